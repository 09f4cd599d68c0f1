"""What may save or end a run between two steps: the clock, and SIGTERM.

In: minutes between checkpoints; the signal that precedes a preemption.
Out: after a step, the same answer on every rank: save, end.
"""

import signal
import time

from local import ranks

EXIT_CODE = 143  # 128 + SIGTERM, as of a process that the signal ended
SECONDS_BETWEEN_QUESTIONS = 5  # to the other ranks: each makes the host wait


class Interrupts:
    """Hears SIGTERM inside a ``with`` block instead of dying of it.

    Attributes
    ----------
    asked : bool
        This process has got the signal.

    Arguments
    ---------
    ckpt_interval_minutes : float
        0: the clock asks for nothing.
    """

    def __init__(self, ckpt_interval_minutes):
        self.interval_s = 60 * ckpt_interval_minutes
        self.asked = False
        self.next_question = 0
        self.last_heard = None
        self.saved()

    def __enter__(self):
        self.before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGTERM, self.before)

    def _hear(self, signal_number, frame):
        self.asked = True

    def saved(self):
        """The clock starts anew."""
        self.last_save = time.monotonic()

    def after(self, step):
        """What to do after a step; a collective call now and then.

        Arguments
        ---------
        step : int
            Of the optimizer, the same on every rank.

        Returns
        -------
        save, end : bool
            Alike on every rank: any rank may end a run, the first decides
            when to save.
        """
        now = time.monotonic()
        due = 0 < self.interval_s <= now - self.last_save
        if ranks.here()[1] == 1:
            return due, self.asked
        if step < self.next_question:
            return False, False
        answers = ranks.gather((due, self.asked, self._pace(step, now)))
        save, _, steps_per_s = answers[0]
        wait = int(SECONDS_BETWEEN_QUESTIONS * steps_per_s)
        self.next_question = step + max(1, wait)
        return save, any(asked for _, asked, _ in answers)

    def _pace(self, step, now):
        """Steps a second since the last question."""
        before, self.last_heard = self.last_heard, (step, now)
        if before is None:
            return 0.0
        return (step - before[0]) / max(now - before[1], 1e-3)


def ignore(worker_id):
    """In a worker that reads audio: the signal is for the trainer to answer."""
    del worker_id
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
