"""The metrics that a task declares: their names, their directions, and those that are no mean over examples.

`Task.metrics` returns values by name, one for each example. A task that has a metric with a name of its own also says
in which direction it improves, and a metric that is no mean over examples is computed from sums:

    class Prices:
        declared_metrics = (
            Metric("off_by_cents", lower_is_better=True),
            Metric("r2", lower_is_better=False, sums=r2_sums, value=r2),
            Metric("f1", torchmetric=MulticlassF1Score(num_classes=3, average="macro")),
        )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fl_tasks.errors import TaskError, task_code

MAX_METRICS, NAME_CHARS = 64, 64
"""Limits of an evaluation: metrics, and characters of a name."""
AVERAGED_PREFIX = "averaged_"
"""Begins the names of what was measured with the averaged model."""
RESERVED_PREFIXES, RESERVED_ENDING = ("clients_", AVERAGED_PREFIX), "_without_personal"
"""The project's own names begin or end so."""
_SUMS = frozenset({"dim_zero_sum", "sum"})
"""Names of functions by which torchmetrics adds states up: its own, and torch.sum."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a task.

    With `sums` and `value`, or with `torchmetric`, it is computed from sums over all examples, which are added up over
    batches and clients. Without them it is a mean over examples, and `Task.metrics` returns its values.
    """

    name: str
    lower_is_better: bool | None = None
    """None: the direction is that of the torchmetrics object or of the project's table of well-known names, or the
    run's file states it."""
    sums: Callable[[Any, Any], Mapping[str, Tensor]] | None = None
    """sums(output, target): tensors by name whose sums over batches are enough to compute the value."""
    value: Callable[[Mapping[str, Tensor]], Any] | None = None
    """value(sums): a number, a tensor, or a mapping of names to numbers, from the float64 sums over all examples."""
    torchmetric: Any = None
    """A torchmetrics object whose states are all reduced by sum. `sums` and `value` stay empty."""
    inputs: Callable[[Any, Any], tuple[Any, ...]] | None = None
    """inputs(output, target): what the torchmetrics object's update() takes. None: output and target."""

    @property
    def summed(self) -> bool:
        """Whether it is computed from sums."""
        return self.sums is not None or self.torchmetric is not None

    @property
    def direction(self) -> bool | None:
        """Whether a lower value is better, as far as the task says it."""
        higher = getattr(self.torchmetric, "higher_is_better", None)
        return self.lower_is_better if self.lower_is_better is not None or higher is None else not higher


def wrong_name(name: object) -> str | None:
    """The rule that a metric's name breaks, as "names of ..."; None if it breaks none.

    A name becomes a column of tables, a label of Prometheus, a key of MLflow and a path of TensorBoard.
    """
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= NAME_CHARS:
        return f"names of 1 to {NAME_CHARS} printable characters"
    if name != name.strip():
        return "names without spaces at their ends"
    if any(part in {"", ".", ".."} for part in name.split("/")):
        return 'names whose parts between slashes are not empty, "." or ".."'
    return None


def checked_names(names: Sequence[object], what: str) -> None:
    """Raises TaskError for a name that is not valid. what: where the names come from, for the message."""
    if len(names) > MAX_METRICS:
        raise TaskError(f"{what}: expected at most {MAX_METRICS} metrics, got {len(names)}")
    for name in names:
        rule = wrong_name(name)
        if rule is None and (str(name).startswith(RESERVED_PREFIXES) or str(name).endswith(RESERVED_ENDING)):
            begins = '" or "'.join(RESERVED_PREFIXES)
            rule = f'names that do not begin with "{begins}" or end with "{RESERVED_ENDING}"'
        if rule is not None:
            raise TaskError(f"{what}: expected {rule}, got {_shown(name)}")


def declared_metrics(task: object) -> tuple[Metric, ...]:
    """The metrics that a task declares; empty if it declares none. Raises TaskError if they are not valid."""
    with task_code("the task's declared_metrics"):
        declared = getattr(task, "declared_metrics", ())
    if not isinstance(declared, Sequence) or not all(isinstance(metric, Metric) for metric in declared):
        raise TaskError(
            "expected the task's declared_metrics as a list or tuple of fl_tasks.Metric, as in"
            f' declared_metrics = (Metric("mae", lower_is_better=True),), got {_shown(declared)}'
        )
    names = [metric.name for metric in declared]
    checked_names(names, "the task's declared_metrics")
    if twice := [name for name in names if names.count(name) > 1]:
        raise TaskError(f"the task's declared_metrics: expected each metric once, got {twice[0]!r} twice")
    for metric in declared:
        _check(metric)
    return tuple(declared)


def declared_directions(task: object) -> Mapping[str, bool]:
    """Whether a lower value is better, for each metric whose direction the task declares. Raises TaskError."""
    directions = {metric.name: metric.direction for metric in declared_metrics(task)}
    return {name: lower for name, lower in directions.items() if lower is not None}


def _check(metric: Metric) -> None:
    if metric.torchmetric is not None:
        if metric.sums is not None or metric.value is not None:
            raise TaskError(f"the metric {metric.name!r}: expected either a torchmetric or sums and value, got both")
        _check_summed_states(metric)
    elif (metric.sums, metric.value) != (None, None) and not (callable(metric.sums) and callable(metric.value)):
        raise TaskError(f"the metric {metric.name!r}: expected sums and value as two functions, got one of them")


def _check_summed_states(metric: Metric) -> None:
    """Raises TaskError for a torchmetrics object with a state that is not reduced by sum."""
    kind = type(metric.torchmetric).__name__
    states, reductions = getattr(metric.torchmetric, "_defaults", None), getattr(metric.torchmetric, "_reductions", {})
    where = f"the metric {metric.name!r} ({kind}): expected a torchmetrics object whose states are all reduced by sum"
    if not isinstance(states, Mapping) or not states:
        raise TaskError(f"{where}, got one without states of its own: declare the metrics that it holds one by one")
    lists = sorted(name for name, state in states.items() if not isinstance(state, Tensor))
    if lists:
        raise TaskError(
            f"{where}, got the lists {', '.join(lists)}, which hold predictions and labels of single examples and would"
            " leave the device: give it fixed bins, such as thresholds=100, or write sums and value"
        )
    others = sorted(name for name in states if getattr(reductions.get(name), "__name__", "") not in _SUMS)
    if others:
        raise TaskError(f"{where}, got others: {', '.join(others)}; write sums and value")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
