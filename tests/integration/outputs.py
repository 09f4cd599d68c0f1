"""What a run has left in its output folder."""

import json
from pathlib import Path


def scores(output_folder, name="test"):
    """The flat scores of a test set."""
    path = Path(output_folder) / "scores" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def checkpoints(output_folder):
    """Checkpoint folders, oldest first."""
    return sorted(Path(output_folder, "save").glob("CKPT+*"))


def curves(output_folder):
    """(lines of the steps, lines of the validations) of curves.jsonl."""
    text = Path(output_folder, "curves.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if "valid" not in line]
    return steps, [line for line in lines if "valid" in line]
