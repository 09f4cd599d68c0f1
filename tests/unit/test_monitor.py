"""What a run tells of itself while it trains."""

import json
import math

import pytest
import torch
from local import curves, monitor
from local.monitor import Monitor

from speechbrain.utils.train_logger import FileTrainLogger

NAN = float("nan")
PATIENCE = 3


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A Monitor that draws nothing, at the start of a run or later."""
    monkeypatch.setattr(curves, "draw", lambda *files: None)

    def begun(every=2, step=0, state=None, patience=PATIENCE):
        logger = FileTrainLogger(tmp_path / "train_log.txt")
        one = Monitor(tmp_path, logger, every, False)
        if state:
            one.load(state, end_of_epoch=False)
        one.begin(step, 100, patience, show=False)
        return one

    return begun


def figures(nats, tokens=10.0, failed=0.0, norm=1.0, scale=(), text=(0.0, 0.0)):
    row = [nats, tokens, failed, *text, norm, *scale]
    return torch.tensor(row, dtype=torch.float64)


def lines(folder):
    text = (folder / "curves.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_covers_its_steps(make, tmp_path):
    one = make()
    one.step(1, 1, 0.1, figures(30.0, tokens=10, norm=1), 4)
    assert not (tmp_path / "curves.jsonl").exists()
    one.step(2, 1, 0.2, figures(30.0, tokens=20, failed=1, norm=3), 4)
    (line,) = lines(tmp_path)
    expected = {"step": 2, "epoch": 1, "lr": 0.2, "skipped": 0}
    expected |= {"loss": 2.0, "grad_norm": 2.0}
    assert line == {
        **expected,
        "clips_per_s": line["clips_per_s"],
        "wait": line["wait"],
    }
    log = (tmp_path / "train_log.txt").read_text(encoding="utf-8")
    assert "steps: 2, lr: 2.00e-01 - train loss: 2.00" in log
    assert "train failed: 1" in log


def test_text_without_audio_is_told_apart_where_there_is_some(make, tmp_path):
    one = make()
    steps = [
        figures(30.0, tokens=10),
        figures(30.0, tokens=20, text=(6.0, 8.0)),
        figures(9.0, tokens=6, text=(9.0, 6.0)),  # of text alone
        figures(NAN, norm=NAN, text=(NAN, 10.0)),
        figures(1.0),
        figures(1.0),
    ]
    for step, row in enumerate(steps, 1):
        one.step(step, 1, 0.1, row, 4)
    found = [
        {k: v for k, v in line.items() if "loss" in k}
        for line in lines(tmp_path)
    ]
    assert found == [
        {"loss": 2.0, "asr_loss": 54 / 22, "text_loss": 0.75},
        {"loss": 1.5, "text_loss": 1.5},
        {"loss": 0.1},
    ]
    one.validated(6, 1, 0.1, {"CER": 3.0}, {})
    one.step(7, 1, 0.1, figures(1.0), 4)
    one.validated(7, 1, 0.1, {"CER": 3.0}, {})
    *_, first, second = (
        (tmp_path / "train_log.txt").read_text(encoding="utf-8").splitlines()
    )
    # (30 + 24 + 2) nats of 42 tokens; 15 nats of 14.
    assert "train asr_loss: 1.33, train text_loss: 1.07" in first
    assert "train loss: 1.00e-01" in second and "text_loss" not in second


NONE = figures(0.0, tokens=0, failed=4.0, norm=0.0)
TEXT = figures(9.0, tokens=6, failed=4.0, text=(9.0, 6.0))


@pytest.mark.parametrize("row", [NONE, TEXT])
def test_a_run_whose_clips_are_gone_stops(make, row, tmp_path):
    one = make()  # fetches every second step
    for step in range(1, PATIENCE):
        one.step(step, 1, 0.1, row, 4)
    one.save(tmp_path / "monitor.ckpt")
    again = make(step=PATIENCE - 1, state=tmp_path / "monitor.ckpt")
    again.step(PATIENCE, 1, 0.1, row, 4)
    with pytest.raises(OSError, match=f"no clip of {PATIENCE} steps in a row"):
        again.validated(PATIENCE, 1, 0.1, {}, {})
    with pytest.raises(OSError, match="has the corpus gone"):
        again.save(tmp_path / "monitor.ckpt")


def test_lines_that_cannot_be_read_stop_no_run(make):
    one = make()
    rows = figures(9.0, tokens=6, failed=1.0, text=(9.0, 6.0)), NONE
    for step in range(1, 3 * PATIENCE):
        one.step(step, 1, 0.1, rows[step % 2], 0)
    one.validated(3 * PATIENCE, 1, 0.1, {"CER": 3.0}, {})
    assert one.counts["failed"] > 0


def test_a_clip_that_is_read_begins_the_count_anew(make):
    one = make()
    part = figures(5.0, tokens=10, failed=3.0)
    text = figures(9.0, tokens=6, text=(9.0, 6.0))  # failed no clip
    rows = [NONE] * (PATIENCE - 1) + [part] + [text] * PATIENCE
    for step, row in enumerate([*rows, *[NONE] * (PATIENCE - 1)], 1):
        one.step(step, 1, 0.1, row, 4)
    one.fetch()
    assert one.n_unread == PATIENCE - 1


def test_a_checkpoint_of_before_there_was_text_is_read(make, tmp_path):
    make().save(tmp_path / "monitor.ckpt")
    state = json.loads((tmp_path / "monitor.ckpt").read_text())
    state |= {"window": [[30.0, 10.0, 1.0]], "totals": [30.0, 10.0]}
    (tmp_path / "monitor.ckpt").write_text(json.dumps(state))
    rest = make(step=1, state=tmp_path / "monitor.ckpt")
    rest.step(2, 1, 0.1, figures(30.0, tokens=20, text=(6.0, 8.0)), 4)
    (line,) = lines(tmp_path)
    assert (line["loss"], line["text_loss"]) == (2.0, 0.75)
    assert rest.totals == [60.0, 30.0, 6.0, 8.0]


def test_a_step_without_finite_gradients_is_counted_and_left_out(
    make, tmp_path
):
    one = make()
    one.step(1, 1, 0.1, figures(NAN, norm=NAN), 4)
    one.step(2, 1, 0.1, figures(20.0), 4)
    one.step(3, 1, 0.1, figures(1.0, norm=math.inf), 4)
    one.step(4, 1, 0.1, figures(NAN, norm=NAN), 4)
    first, second = lines(tmp_path)
    assert (first["loss"], first["skipped"]) == (2.0, 1)
    assert math.isnan(second["loss"]) and second["skipped"] == 2
    one.validated(4, 1, 0.1, {"loss": 1.0, "CER": 3.0}, {"padding": 2.0})
    log = (tmp_path / "train_log.txt").read_text(encoding="utf-8")
    last = log.splitlines()[-1]
    assert "train loss: 2.00" in last and "train skipped: 3" in last
    assert "train padding: 2.00" in last and "valid CER: 3.00" in last
    assert lines(tmp_path)[-1] == {
        "step": 4,
        "epoch": 1,
        "valid": {"loss": 1.0, "CER": 3.0},
    }


def test_too_many_in_a_row_stop_the_run_and_say_what_to_do(make):
    one = make(every=1, patience=3)
    bad = figures(NAN, norm=NAN)
    for step in (1, 2):
        one.step(step, 1, 0.1, bad, 4)
    one.step(3, 1, 0.1, figures(1.0), 4)
    for step in (4, 5):
        one.step(step, 1, 0.1, bad, 4)
    with pytest.raises(ValueError, match="of 3 steps in.*step 6.*lr") as told:
        one.step(6, 1, 0.1, bad, 4)
    assert "fp16" not in str(told.value)


def test_too_many_in_a_row_are_not_forgiven_for_a_good_one(make):
    one = make(every=4, patience=3)
    for step in (1, 2, 3):
        one.step(step, 1, 0.1, figures(NAN, norm=NAN), 4)
    with pytest.raises(ValueError, match="of 3 steps in a row"):
        one.step(4, 1, 0.1, figures(1.0), 4)


def test_what_was_skipped_before_a_kill_counts(make, tmp_path):
    one = make(every=20, patience=3)
    for step in (1, 2):
        one.step(step, 1, 0.1, figures(NAN, norm=NAN), 4)
    one.save(tmp_path / "monitor.ckpt")
    rest = make(every=20, patience=3, step=2, state=tmp_path / "monitor.ckpt")
    rest.step(3, 1, 0.1, figures(NAN, norm=NAN), 4)
    with pytest.raises(ValueError, match="of 3 steps in a row"):
        rest.validated(3, 1, 0.1, {"CER": 1.0}, {})


def test_no_checkpoint_is_of_a_run_that_must_stop(make, tmp_path):
    """It would stop at once, whatever was changed."""
    one = make(every=20, patience=3)
    for step in (1, 2, 3):
        one.step(step, 1, 0.1, figures(NAN, norm=NAN), 4)
    one.step(4, 1, 0.1, figures(1.0), 4)
    with pytest.raises(ValueError, match="of 3 steps in.*before step 4"):
        one.save(tmp_path / "monitor.ckpt")
    assert not (tmp_path / "monitor.ckpt").exists()


def test_the_loss_scale_of_the_last_step_is_told_where_there_is_one(
    make, tmp_path
):
    one = make()
    for step, scale in enumerate((65536.0, 32768.0), 1):
        one.step(step, 1, 0.1, figures(1.0, scale=[scale]), 4)
    log = (tmp_path / "train_log.txt").read_text(encoding="utf-8")
    assert "train loss_scale: 3.28e+04" in log
    one = make(step=2)  # in another precision
    one.step(4, 1, 0.1, figures(1.0), 4)
    one.step(6, 1, 0.1, figures(1.0, scale=[1.0]), 4)
    told = [line.get("loss_scale") for line in lines(tmp_path)]
    assert told == [None, 1.0]


# Loss scales of steps, skipped where they are negative; when the run stops.
SCALES = [
    ([-(2.0**n) for n in range(16, 0, -1)], None),
    ([-(2.0**n) for n in range(16, -9, -1)], 19),
    ([-4.0, -2.0, -1.0, -0.5, 0.25, -0.25, -0.125], None),
    ([-4.0, 2.0, -2.0, 1.0, -1.0, -0.5, -0.25], 7),
    ([math.nan, math.nan, math.nan], 3),  # NaN: without one
    ([math.nan, math.nan, -2.0, -1.0], 4),  # once bf16, then fp16
]


@pytest.mark.parametrize("scales, last", SCALES)
def test_a_step_counts_once_the_loss_scale_is_no_excuse(make, scales, last):
    one = make(every=1, patience=3)
    stopped = None
    for step, scale in enumerate(scales, 1):
        norm = 1.0 if scale > 0 else NAN
        own = [] if math.isnan(scale) else [abs(scale)]
        try:
            one.step(step, 1, 0.1, figures(1.0, norm=norm, scale=own), 4)
        except ValueError as error:
            stopped = step
            assert ("bf16 or fp32 instead of fp16" in str(error)) == bool(own)
            assert not own or f"scales down to {own[0]:g}" in str(error)
            break
    assert stopped == last
    n_skipped = sum(not scale > 0 for scale in scales[:stopped])
    assert one.counts["skipped"] == n_skipped


def test_lines_are_the_same_however_often_a_run_was_killed(make, tmp_path):
    """Saved at step 3, within a line; killed at step 5, after another."""
    steps = {
        n: (0.1 * n, figures(n / 3, norm=1 / n, text=(n / 9, 4.0)))
        for n in range(1, 9)
    }

    def go(one, first, last, save_at=None):
        for n in range(first, last + 1):
            one.step(n, 1, *steps[n], 4)
            if n == save_at:
                one.save(tmp_path / "monitor.ckpt")
        return one

    def told():
        keys = "step", "lr", "loss", "asr_loss", "text_loss", "grad_norm"
        return [[line[key] for key in keys] for line in lines(tmp_path)]

    whole = go(make(), 1, 8)
    totals, expected = whole.totals, told()
    (tmp_path / "curves.jsonl").unlink()
    go(make(), 1, 5, save_at=3)
    assert len(lines(tmp_path)) == 2
    rest = make(step=3, state=tmp_path / "monitor.ckpt")
    assert len(lines(tmp_path)) == 1
    go(rest, 4, 8)
    assert told() == expected
    assert rest.totals == totals


def test_a_run_from_its_first_step_begins_an_empty_file(make, tmp_path):
    make(every=1).step(1, 1, 0.1, figures(1.0), 4)
    assert len(lines(tmp_path)) == 1
    make()
    assert lines(tmp_path) == []


def test_time_aside_is_no_time_of_the_training(make, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now[0])
    one = make(every=1)

    def loader():
        for n in range(2):
            now[0] += 1.0  # read
            yield n

    for n in one.timed(loader()):
        now[0] += 3.0  # trained
        if n == 1:
            with one.aside():
                now[0] += 100.0  # validated
    one.step(1, 1, 0.1, figures(1.0), 16)
    (line,) = lines(tmp_path)
    assert line["clips_per_s"] == pytest.approx(2.0)
    assert line["wait"] == pytest.approx(25.0)


def test_a_disk_that_is_full_is_told_with_the_file(make, monkeypatch, tmp_path):
    one = make(every=1)
    (tmp_path / "curves.jsonl").unlink(missing_ok=True)
    (tmp_path / "curves.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="curves.jsonl.*same command again"):
        one.step(1, 1, 0.1, figures(1.0), 4)


def test_no_picture_is_worth_a_run(make, monkeypatch, tmp_path, caplog):
    def fails(*files):
        raise OSError(28, "No space left on device")

    one = make()
    monkeypatch.setattr(curves, "draw", fails)
    one.validated(2, 1, 0.1, {"CER": 1.0}, {})
    assert len(lines(tmp_path)) == 1
