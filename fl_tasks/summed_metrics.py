"""Metrics that are no mean over examples: their sums over batches and clients, and their values.

The sums of a metric are float64 tensors by name whose number and shapes are the same for every batch. They are added
up, batch by batch and client by client, and the value is computed once from the totals.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_tasks.errors import TaskError, task_code
from fl_tasks.metrics import AVERAGED_PREFIX, RESERVED_ENDING, Metric, checked_names, declared_metrics, wrong_name

Key = tuple[str, str]
"""(metric, name of one of its sums)."""
Sums = Mapping[Key, NDArray[np.float64]]
"""Totals, as plain data."""

MAX_SUM_VALUES = 16_384
"""Numbers in all sums of a task: a client sends eight bytes for each."""


def summed_metrics(task: object) -> list[SummedMetric]:
    """The task's metrics that are computed from sums, ready for an evaluation. Raises TaskError."""
    return [SummedMetric(metric) for metric in declared_metrics(task) if metric.summed]


def sums_of_batch(metrics: Iterable[SummedMetric], output: Any, target: Any) -> dict[Key, Tensor]:
    """The sums of one batch, where the batch is. Raises TaskError."""
    sums = {(metric.name, name): value for metric in metrics for name, value in metric.sums(output, target).items()}
    if (count := sum(value.numel() for value in sums.values())) > MAX_SUM_VALUES:
        raise TaskError(f"expected at most {MAX_SUM_VALUES:,} numbers in all sums of the task's metrics, got {count:,}")
    return sums


def values_of(task: object, sums: Sums) -> dict[str, float]:
    """The values of all metrics that are computed from sums. Raises TaskError."""
    values: dict[str, float] = {}
    for metric in summed_metrics(task):
        if own := {name: total for (of, name), total in sums.items() if of == metric.name}:
            values.update(metric.value(own))
    return values


def finite_values_of(task: object, sums: Sums) -> dict[str, float]:
    """The finite values of these metrics for one client, which may have too few examples for some of them."""
    finite: dict[str, float] = {}
    for metric in summed_metrics(task):
        try:
            values = metric.value({name: total for (of, name), total in sums.items() if of == metric.name})
        except TaskError:
            continue
        finite.update({name: value for name, value in values.items() if math.isfinite(value)})
    return finite


class SummedMetric:
    """One metric for one evaluation. Not for two threads at once."""

    def __init__(self, metric: Metric) -> None:
        self._metric, self.name = metric, metric.name
        # A copy: another evaluation may use the task's own object at the same time.
        self._own = copy.deepcopy(metric.torchmetric)
        if self._own is not None:
            # Ranks share evaluations by themselves: the object must not add up the states of all processes.
            self._own.sync_on_compute = self._own._to_sync = False  # noqa: SLF001 - torchmetrics has no other switch

    def sums(self, output: Any, target: Any) -> dict[str, Tensor]:
        """The sums of a batch by name, in float64. Raises TaskError."""
        with task_code(f"the metric {self.name!r}"):
            sums = self._states(output, target) if self._own is not None else self._metric.sums(output, target)  # type: ignore[misc]
        if not isinstance(sums, Mapping) or not all(map(_is_sum, sums.items())):
            raise TaskError(
                f"the metric {self.name!r}: expected sums() to return a dict of tensors by name, got {sums!r}"[:500]
            )
        return {name: value.detach().double() for name, value in sums.items()}

    def value(self, sums: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
        """The value of sums under the metric's name; several values under NAME/KEY. Raises TaskError."""
        totals = {name: torch.from_numpy(np.array(total)) for name, total in sums.items()}
        with task_code(f"the value of the metric {self.name!r}"), torch.no_grad():
            value = self._computed(totals) if self._own is not None else self._metric.value(totals)  # type: ignore[misc]
            values = _named(self.name, value)
        checked_names(list(values), f"the metric {self.name!r}")
        return values

    def _states(self, output: Any, target: Any) -> dict[str, Tensor]:
        own, inputs = self._own, self._metric.inputs
        if isinstance(output, Tensor):
            own.to(output.device)
        own.reset()
        own.update(*((output, target) if inputs is None else inputs(output, target)))
        return {name: getattr(own, name).clone() for name in own._defaults}  # noqa: SLF001 - the states have no public list

    def _computed(self, totals: Mapping[str, Tensor]) -> Any:
        own = self._own.to("cpu")
        own.reset()
        for name, total in totals.items():
            default = own._defaults[name]  # noqa: SLF001 - as above
            setattr(own, name, total if default.is_floating_point() else total.to(default.dtype))
        own._update_count = 1  # noqa: SLF001 - otherwise compute() warns that nothing was measured
        return own.compute()


def _is_sum(named: tuple[object, object]) -> bool:
    name, value = named
    return wrong_name(name) is None and isinstance(value, Tensor) and not value.is_complex()


def _named(name: str, values: Any) -> dict[str, float]:
    if isinstance(values, Mapping):
        return {f"{name}/{key}": float(value) for key, value in values.items()}
    if isinstance(values, Tensor) and values.numel() > 1:
        places = product(*map(range, values.shape))
        return {"/".join(map(str, (name, *place))): float(values[place]) for place in places}
    return {name: float(values)}


PlainSum = tuple[str, str, Sequence[int], Sequence[float]]
"""(metric, name of the sum, shape, values in row-major order), as it is sent and stored."""


def plain(sums: Sums) -> list[PlainSum]:
    """Sums as plain values, in order of their names."""
    return [
        (metric, name, list(sums[metric, name].shape), sums[metric, name].ravel().tolist())
        for metric, name in sorted(sums)
    ]


def without_personal(sums: Iterable[PlainSum]) -> list[PlainSum]:
    """Sums with the initial values of personal parameters, under the names of metrics of their own."""
    return [(f"{metric}{RESERVED_ENDING}", name, shape, values) for metric, name, shape, values in sums]


def of_averaged_model(sums: Iterable[PlainSum]) -> list[PlainSum]:
    """Sums of the averaged model, under the names of metrics of their own."""
    return [(f"{AVERAGED_PREFIX}{metric}", name, shape, values) for metric, name, shape, values in sums]


class Pool:
    """The sums of many clients, added up in the order in which they are given: that of id bytes.

    Clients whose sums have other names or shapes than those of most clients are left out.
    """

    def __init__(self) -> None:
        self._kinds: dict[object, tuple[int, dict[Key, NDArray[np.float64]]]] = {}

    def add(self, sums: Sequence[PlainSum]) -> None:
        """Add the sums of one client; without any, it measured no such metric."""
        if not sums:
            return
        kind = tuple((metric, name, tuple(shape)) for metric, name, shape, _ in sums)
        count, totals = self._kinds.get(kind, (0, {}))
        for metric, name, shape, values in sums:
            part = np.asarray(values, np.float64).reshape(tuple(shape))
            totals[metric, name] = totals[metric, name] + part if count else part
        self._kinds[kind] = count + 1, totals

    @property
    def left_out(self) -> int:
        """Clients whose sums are of another kind."""
        counts = [count for count, _ in self._kinds.values()]
        return sum(counts) - max(counts, default=0)

    @property
    def plain(self) -> list[PlainSum]:
        """The totals, as those of one client."""
        return plain(self._totals)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that have sums."""
        return list(dict.fromkeys(metric for metric, _ in self._totals))

    def values(self, task: object) -> tuple[dict[str, float], list[str]]:
        """The value of each metric over all examples of these clients, and why others have none.

        A client may send any numbers, so what the task's code raises for them ends no run.
        """
        values, problems = dict[str, float](), list[str]()
        declared = {metric.name: metric for metric in summed_metrics(task)}
        for full in self.metrics:
            own = {name: total for (metric, name), total in self._totals.items() if metric == full}
            prefix = AVERAGED_PREFIX if full.startswith(AVERAGED_PREFIX) else ""
            ending = RESERVED_ENDING if full.endswith(RESERVED_ENDING) else ""
            try:
                if (metric := declared.get(full.removeprefix(prefix).removesuffix(ending))) is None:
                    raise TaskError(f"expected sums of the task's declared metrics, got those of {full!r}")
                values.update({f"{prefix}{name}{ending}": value for name, value in metric.value(own).items()})
            except TaskError as error:
                problems.append(str(error))
        return values, problems

    @property
    def _totals(self) -> Mapping[Key, NDArray[np.float64]]:
        return max(self._kinds.values(), key=lambda counted: counted[0], default=(0, {}))[1]
