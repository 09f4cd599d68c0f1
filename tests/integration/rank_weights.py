"""Runs train.py and keeps each rank's trained weights; started by torchrun.

python rank_weights.py FOLDER train.py's arguments
"""

import os
import sys
from pathlib import Path

from safetensors.torch import save_file

sys.path.insert(0, os.getcwd())
import train  # noqa: E402

folder = Path(sys.argv.pop(1))
sys.argv[0] = "train.py"
test = train.ASR.test


def keep_then_test(self, *arguments, **options):
    """The weights after the last step, before the best are loaded."""
    rank = os.environ.get("RANK", "0")
    state = {k: v.clone() for k, v in self.whisper.trained_state().items()}
    save_file(state, folder / f"rank{rank}.safetensors")
    test(self, *arguments, **options)


train.ASR.test = keep_then_test
train.main()
