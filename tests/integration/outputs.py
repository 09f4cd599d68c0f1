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


def greedy_text(loaded, clip, n_most):
    """What a ``faster_whisper.WhisperModel`` writes when it only decodes."""
    segments, _ = loaded.transcribe(
        clip,
        language="ko",
        suppress_tokens=[],
        beam_size=1,
        temperature=0,
        without_timestamps=True,
        max_new_tokens=2 * n_most - 4,  # half of them, and of the prefix
        compression_ratio_threshold=None,
        log_prob_threshold=None,
        no_speech_threshold=None,
    )
    return "".join(segment.text for segment in segments).strip()
