"""Lets the tests import the recipe as its scripts do.

In: this file's place in the repository.
Out: the recipe folder at the head of sys.path.
"""

import os
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[1] / "recipes/Korean/ASR/whisper"

sys.path.insert(0, str(RECIPE))
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems():
    """Hypothesis asks every module for its file, which makes SpeechBrain's
    lazy modules import packages that nobody needs here."""
    importutils = sys.modules.get("speechbrain.utils.importutils")
    if importutils:
        importutils.LazyModule.__file__ = None
