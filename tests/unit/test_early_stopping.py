"""When a run ends because it no longer improves."""

import pytest
from local.early_stopping import EarlyStopping

NAN = float("nan")


@pytest.mark.parametrize(
    "patience, min_delta, values, stops",
    [
        (0, 0.0, [9, 9, 9, 9], [0, 0, 0, 0]),
        (1, 0.0, [9, 8, 8], [0, 0, 1]),
        (2, 0.0, [9, 9, 8, 8, 9], [0, 0, 0, 0, 1]),
        (2, 0.5, [9, 8.6, 8.5, 8.4], [0, 0, 1, 0]),
        (1, 0.0, [NAN, 9, NAN], [1, 0, 1]),
    ],
    ids=["off", "equal", "counts anew", "min_delta", "not a number"],
)
def test_patience(patience, min_delta, values, stops):
    stopping = EarlyStopping("CER", patience, min_delta)
    found = []
    for value in values:
        stopping.heard(value)
        found.append(stopping.should_stop)
    assert found == list(map(bool, stops))


def test_what_was_seen_is_kept_and_patience_may_change(tmp_path):
    one = EarlyStopping("CER", 2, 0.0)
    for value in (0.1 + 0.2, 5, 5):
        one.heard(value)
    assert one.should_stop
    one.save(tmp_path / "early_stopping.ckpt")
    more = EarlyStopping("CER", 3, 0.0)
    more.load(tmp_path / "early_stopping.ckpt", end_of_epoch=False)
    assert (more.lowest, more.n_worse) == (0.1 + 0.2, 2)
    assert not more.should_stop
    more.heard(5)
    assert more.should_stop


def test_nothing_seen_can_be_kept(tmp_path):
    EarlyStopping("CER", 1, 0.0).save(tmp_path / "early_stopping.ckpt")
    stopping = EarlyStopping("CER", 1, 0.0)
    stopping.load(tmp_path / "early_stopping.ckpt", end_of_epoch=True)
    stopping.heard(1e9)
    assert not stopping.should_stop


def test_what_was_seen_of_another_metric_does_not_count(tmp_path):
    one = EarlyStopping("CER", 2, 0.0)
    one.heard(5.0)
    one.heard(6.0)
    one.save(tmp_path / "early_stopping.ckpt")
    other = EarlyStopping("WER", 2, 0.0)
    other.load(tmp_path / "early_stopping.ckpt", end_of_epoch=False)
    other.heard(15.0)
    assert (other.lowest, other.n_worse) == (15.0, 0)
