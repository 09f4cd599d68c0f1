"""Runs of train.py, one after the other, on each rank; started by torchrun.

python rank_runs.py FOLDER

FOLDER/runs.json: name of a run to its arguments. Each rank writes there the
weights after the last step, and the micro-batches it took.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.getcwd())
import recorded  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from speechbrain.utils import distributed  # noqa: E402

folder = Path(sys.argv[1])
rank = os.environ["RANK"]
runs = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
for name, arguments in runs.items():
    brain = recorded.start(*arguments)
    distributed.ddp_init_group = lambda run_opts: None  # one group for all
    save_file(brain.trained, folder / f"{name}.{rank}.safetensors")
    took = {"seen": brain.seen, "encoded": brain.encoded}
    (folder / f"{name}.{rank}.json").write_text(json.dumps(took), "utf-8")
