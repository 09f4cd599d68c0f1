"""Jobs that make feature shards at once: which may, and which may not."""

import pytest
from local import feature_shards
from test_manifest_folder import held


def locked(out, name):
    """Another process makes a shard."""
    return held(out / "locks" / name)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes no chunk of an empty list; the rest is as it is."""
    monkeypatch.setattr(feature_shards, "_planned", lambda *_: [])

    def call(shard):
        return feature_shards.make("", tmp_path, "", shard=shard)

    return call


def test_jobs_of_another_number_are_refused(tmp_path, make):
    with locked(tmp_path, "1_of_2"):
        make((2, 2))
        with pytest.raises(ValueError, match="--shard 1/2 of .* is being made"):
            make((1, 2))
        for shard in ((1, 1), (3, 3)):
            with pytest.raises(ValueError) as error:
                make(shard)
            told = f"a job of --shard …/{shard[1]} would make some of the same"
            assert told in str(error.value)
            assert "--shard 1/2 of" in str(error.value)
    make((1, 1))


def test_what_asks_holds_nothing_afterwards(tmp_path, make):
    make((1, 2))
    make((1, 1))
    with locked(tmp_path, "1_of_2"), locked(tmp_path, "1_of_1"):
        pass


def test_a_job_that_is_refused_holds_nothing(tmp_path, make):
    with locked(tmp_path, "1_of_2"):
        with pytest.raises(ValueError):
            make((1, 1))
        with locked(tmp_path, "1_of_1"):
            pass
