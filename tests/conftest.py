"""Lets the tests import the recipe as its scripts do.

In: this file's place in the repository.
Out: the recipe folder at the head of sys.path; tests, the longest ones first.
"""

import functools
import os
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[1] / "recipes/Korean/ASR/whisper"
LONGEST = "test_quickstart.py"

sys.path.insert(0, str(RECIPE))
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The longest comes first, so that no process waits for it at the end.

    And Hypothesis asks every module for its file, which makes SpeechBrain's
    lazy modules import packages that nobody needs here.
    """
    items.sort(key=lambda item: item.path.name != LONGEST)
    importutils = sys.modules.get("speechbrain.utils.importutils")
    if importutils:
        importutils.LazyModule.__file__ = None


@pytest.fixture(autouse=True, scope="session")
def merges_are_found_once():
    """Those of random models: of one file, but half a second each time."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    name = "extract_vocab_merges_from_model"
    find = functools.cache(getattr(TikTokenConverter(), name))

    def found(converter, path):
        vocabulary, merges = find(path)
        return dict(vocabulary), list(merges)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TikTokenConverter, name, found)
        yield
