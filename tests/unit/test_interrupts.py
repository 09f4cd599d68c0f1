"""What may save or end a run between two steps."""

import os
import signal

import pytest
from local import interrupts, ranks


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    return now


def test_the_clock_asks_once_an_interval(clock):
    asked = interrupts.Interrupts(ckpt_interval_minutes=2)
    assert asked.after(1) == (False, False)
    clock[0] += 119
    assert asked.after(2) == (False, False)
    clock[0] += 1
    assert asked.after(3) == (True, False)
    asked.saved()
    assert asked.after(4) == (False, False)


def test_no_interval_asks_for_nothing(clock):
    asked = interrupts.Interrupts(0)
    clock[0] += 1e9
    assert asked.after(1) == (False, False)


def test_the_signal_is_heard_inside_the_block_alone():
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.Interrupts(0) as asked:
        assert asked.after(1) == (False, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.asked
        assert asked.after(2) == (False, True)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_are_asked_now_and_then_and_any_may_end(clock, monkeypatch):
    questions = []
    others = [(False, False, 0.0)]

    def gather(answer):
        questions.append(answer)
        return [answer, *others]

    monkeypatch.setattr(ranks, "here", lambda: (0, 2))
    monkeypatch.setattr(ranks, "gather", gather)
    asked = interrupts.Interrupts(0)
    found = []
    for step in range(1, 25):
        clock[0] += 0.5  # two steps a second: every tenth is a question
        found.append(asked.after(step))
    assert [i + 1 for i, _ in enumerate(found)][-1] == 24
    assert len(questions) == 4  # steps 1, 2, 12, 22
    others[0] = (True, True, 2.0)  # when to save is the first rank's to say
    for step in range(25, 33):
        clock[0] += 0.5
        found.append(asked.after(step))
    assert found[-1] == (False, True)
    assert not any(save or end for save, end in found[:-1])
