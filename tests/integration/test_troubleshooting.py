"""What the README's Troubleshooting quotes, where no other test reads it."""

import shlex
import sys
from functools import partial

import pytest
from local import prepare

HEAD = "python -m local.prepare "


class Stopped(Exception):
    """In place of a preparation."""


def stops(*arguments, **options):
    """Raises it."""
    raise Stopped


def no_label_is_too_long(text):
    """What a test needs no tokenizer for."""
    del text
    return True


def test_torchruns_others_are_told_what_to_run_first(
    corpus, tmp_path, monkeypatch, caplog
):
    """And that command's manifests are those that the run looks for."""
    out = tmp_path / "run"
    choices = dict(corpus="manifest", data_folder=str(corpus))
    choices |= dict(text_form="spelling", columns={}, heldout_share=0.02)
    limits = dict(label_fits=no_label_is_too_long)
    limits |= dict(max_duration_s=5.0, slowest_speed=1.0)
    needed = partial(prepare.prepare, **choices)

    with monkeypatch.context() as patch:
        patch.setattr(prepare.ranks, "here", lambda: (0, 2))
        patch.setattr(prepare, "run_on_main", stops)
        with pytest.raises(Stopped):
            prepare.for_run("", out, needed, **limits)
    (told,) = (r.message for r in caplog.records if HEAD in r.message)
    assert "the other processes wait for the manifests" in told
    argv = shlex.split(told.partition(HEAD)[2])
    monkeypatch.setattr(sys, "argv", ["local.prepare", *argv])
    prepare.main()
    monkeypatch.setattr(prepare, "_prepare", stops)
    assert (prepare.for_run("", out, needed, **limits) / "test.csv").is_file()


def test_torchrun_on_cpus_is_told_its_backend(here, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    remedy = "'nccl': not on CPUs; give --distributed_backend=gloo --device=cpu"
    with pytest.raises(SystemExit, match=remedy):
        here(tmp_path / "run")
    assert not (tmp_path / "run").exists()
