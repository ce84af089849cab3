"""Whether a lower or a higher value of a metric is better.

A run's file or its task says so. The table here has the names whose direction is the same for everybody. The direction
of any other name is unknown: nothing is guessed from a part of a name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

LOSS = "loss"
"""The metric of a run that names none."""
PREFIX = "clients_"
"""Begins the name of a metric of the clients' evaluations."""
AVERAGED = "averaged_"
"""Begins the name of a metric of the averaged model, after PREFIX if clients measured it. Other names are of the latest
model."""
WITHOUT_PERSONAL = "_without_personal"
"""Ends the name of a metric that a client measured with the initial values of its personal parameters."""

_LOWER = (
    "loss", "error", "error_rate", "mae", "mse", "rmse", "mape", "nll", "cross_entropy", "log_loss", "perplexity",
    "wer", "cer", "brier", "brier_score", "ece",
)  # fmt: skip
_HIGHER = (
    "accuracy", "balanced_accuracy", "top5_accuracy", "precision", "recall", "f1", "f1_macro", "f1_micro", "auc",
    "auroc", "roc_auc", "average_precision", "r2", "mcc", "iou", "mean_iou", "dice", "bleu",
)  # fmt: skip
WELL_KNOWN: Mapping[str, bool] = MappingProxyType({name: name in _LOWER for name in (*_LOWER, *_HIGHER)})
"""Metric -> whether a lower value is better."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """The metric by which models are compared, and its direction."""

    metric: str = LOSS
    lower_is_better: bool = True

    def better(self, a: float | None, b: float | None) -> bool:
        """Whether `a` is a better value than `b`. No value is never better; a value is better than none.

        NaN and infinity are no values.
        """
        if a is None or not math.isfinite(a):
            return False
        if b is None or not math.isfinite(b):
            return True
        return a < b if self.lower_is_better else a > b

    def reaches(self, value: float, target: float) -> bool:
        """Whether a finite value is at least as good as the target."""
        return math.isfinite(value) and not self.better(target, value)


BY_LOSS, BY_ACCURACY = Criterion(), Criterion("accuracy", lower_is_better=False)
"""The lowest loss, and the highest accuracy."""


@dataclass(frozen=True, slots=True)
class Directions:
    """The directions that a run knows."""

    declared: Mapping[str, bool] = field(default_factory=dict)
    """Metric -> whether a lower value is better, by the run's file and its task. They go before the table."""

    def lower_is_better(self, metric: str) -> bool | None:
        """The direction of a metric, also of the clients' statistics of one; None if it is unknown.

        A smaller standard deviation over clients is better, of every metric.
        """
        if (known := self._known(metric)) is not None or not metric.startswith(PREFIX):
            return known
        own = metric.removeprefix(PREFIX)
        if own.endswith("_std"):
            return True
        for ending in ("", "_mean", "_worst_decile"):
            for base in (own.removesuffix(ending), own.removesuffix(ending).removesuffix(WITHOUT_PERSONAL)):
                if own.endswith(ending) and (known := self._known(base)) is not None:
                    return known
        return None

    def _known(self, metric: str) -> bool | None:
        own = metric.removeprefix(AVERAGED)
        return self.declared.get(metric, self.declared.get(own, WELL_KNOWN.get(own)))


def of_averaged(metric: str) -> bool:
    """Whether a metric is of the averaged model: of the server's evaluation, or of the clients'."""
    return metric.removeprefix(PREFIX).startswith(AVERAGED)


def as_averaged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the averaged model under their names beside those of the latest model."""
    return {f"{AVERAGED}{name}": value for name, value in metrics.items()}
