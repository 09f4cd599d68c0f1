"""The learning rate of every step.

In: a schedule's name, its highest rate, its warm-up; a step of how many.
Out: the rate, set in an optimizer; a table of rates; a group with its own.
"""

import math

import numpy as np

SCHEDULES = ("noam", "cosine", "linear", "constant")


class Schedule:
    """The rate as a function of the step; nothing of it is in checkpoints.

    With w warm-up steps, at step n of N:

    - ``noam``: lr · min(n / w, sqrt(w / n)), of Vaswani et al. 2017
      (https://arxiv.org/abs/1706.03762, section 5.3), scaled to peak at lr.
      There, as with ``model_size`` in SpeechBrain's NoamScheduler, it is
      lr · model_size^-0.5 · min(n^-0.5, n · w^-1.5), which peaks at
      lr · (model_size · w)^-0.5;
    - ``linear``: lr · n / w up to step w, then
      lr · (N - n + 1) / (N - w + 1);
    - ``cosine``: the same warm-up, then lr · (1 + cos(pi · p)) / 2 with
      p = (n - w) / (N - w + 1);
    - ``constant``: lr, without a warm-up.

    Linear and cosine reach 0 one step after the last, and stay there: every
    step of a run has an effect. They are those of Transformers at step n of
    N + 1, which counts from 0 and gives its step 0 no rate.

    Arguments
    ---------
    schedule : str
        One of ``SCHEDULES``.
    lr : float
        The highest rate.
    warmup_steps : int or float
        From 1: steps. Between 0 and 1: a share of the run, rounded, at least
        one step. 0: none; ``noam`` takes one.

    Raises
    ------
    ValueError
        There is no such schedule.
    """

    def __init__(self, schedule, lr, warmup_steps):
        if schedule not in SCHEDULES:
            raise ValueError(
                f"schedule={schedule!r}: choose {', '.join(SCHEDULES)}"
            )
        self.schedule, self.lr = schedule, float(lr)
        self.warmup_steps = warmup_steps

    def n_warmup(self, n_steps):
        """Warm-up steps of a run of ``n_steps``; the last has the rate lr."""
        if self.schedule == "constant":
            return 0
        if 0 < self.warmup_steps < 1:
            return max(1, round(self.warmup_steps * n_steps))
        return max(int(self.warmup_steps), int(self.schedule == "noam"))

    def rate(self, step, n_steps):
        """The rate of one step, the same to the bit on every call.

        Arguments
        ---------
        step : int
            From 1. Beyond ``n_steps`` linear and cosine give 0.
        n_steps : int
            Of the run.

        Returns
        -------
        float
            From 0 to lr.
        """
        w = self.n_warmup(n_steps)
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "noam":
            return self.lr * min(step / w, math.sqrt(w / step))
        if step <= w:
            return self.lr * (step / w)  # in this order: exactly lr at step w
        left = max(0, n_steps - step + 1) / max(1, n_steps - w + 1)
        if self.schedule == "linear":
            return self.lr * left
        return self.lr * (1 + math.cos(math.pi * (1 - left))) / 2

    def set(self, optimizer, step, n_steps):
        """Gives each group the rate of a step, before that step is made.

        Arguments
        ---------
        optimizer : torch.optim.Optimizer
            A group's rate is multiplied by its ``lr_multiplier``, if any.
        step, n_steps : int

        Returns
        -------
        float
            The rate, without any multiplier.
        """
        rate = self.rate(step, n_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_multiplier", 1.0)
        return rate

    def table(self, n_steps, n_rows=12):
        """Steps and their rates, for the terminal.

        Arguments
        ---------
        n_steps : int
            Of the run, at least 1.
        n_rows : int
            Steps at most, at least 3: the first, the highest, the last, and
            others evenly between.

        Returns
        -------
        str
            A line for each, below one of names.
        """
        spread = np.linspace(0, n_steps, n_rows - 1).round().clip(1)
        highest = min(max(self.n_warmup(n_steps), 1), n_steps)
        steps = sorted({highest, *map(int, spread)})
        width = max(len(f"{n_steps:,}"), len("step"))
        lines = [f"{'step':>{width}}  rate"]
        for step in steps:
            lines.append(f"{step:>{width},}  {self.rate(step, n_steps):.2e}")
        return "\n".join(lines)


def separate(optimizer, parameter, lr_multiplier):
    """Moves a parameter to a group of its own, for a rate of its own.

    Arguments
    ---------
    optimizer : torch.optim.Optimizer
        Before its first step. Without the parameter it stays as it is.
    parameter : torch.nn.Parameter
    lr_multiplier : float
        Of the rate that the other groups have.
    """
    for group in list(optimizer.param_groups):
        others = [p for p in group["params"] if p is not parameter]
        if len(others) < len(group["params"]):
            own = {**group, "params": [parameter]}
            group["params"] = others
            optimizer.add_param_group({**own, "lr_multiplier": lr_multiplier})
