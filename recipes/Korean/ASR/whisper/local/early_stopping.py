"""When a run ends because it no longer improves.

In: the metric of each validation, lower is better.
Out: whether to stop; what was seen is kept in checkpoints.
"""

import json
from pathlib import Path

from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)


@register_checkpoint_hooks
class EarlyStopping:
    """Counts the validations since the metric last fell.

    Arguments
    ---------
    metric : str
        Its name: what was seen of another one does not count.
    patience : int
        Validations without a better one, then stop; 0: never.
    min_delta : float
        What a metric must fall by to be better, in its own unit.
    """

    def __init__(self, metric, patience, min_delta):
        self.metric = metric
        self.patience, self.min_delta = patience, min_delta
        self.lowest, self.n_worse = float("inf"), 0

    def heard(self, value):
        """Takes in the metric of one validation."""
        if value < self.lowest - self.min_delta:
            self.lowest, self.n_worse = value, 0
        else:
            self.n_worse += 1

    @property
    def should_stop(self):
        """Whether patience has run out."""
        return 0 < self.patience <= self.n_worse

    @mark_as_saver
    def save(self, path):
        """Writes what was seen."""
        seen = {
            "metric": self.metric,
            "lowest": self.lowest,
            "n_worse": self.n_worse,
        }
        Path(path).write_text(json.dumps(seen), encoding="utf-8")

    @mark_as_loader
    def load(self, path, end_of_epoch):
        """Reads what ``save`` wrote."""
        del end_of_epoch
        seen = json.loads(Path(path).read_text(encoding="utf-8"))
        if seen["metric"] == self.metric:
            self.lowest, self.n_worse = seen["lowest"], seen["n_worse"]
