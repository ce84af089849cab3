"""Metrics with a label `run`: told of every run that goes on, and of those that ended last, so that they stay few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from prometheus_client import Counter, Histogram

from protos.metrics import ANY, Kit, Values, started

M = TypeVar("M", Counter, Histogram)

RUNS_KEPT = 20
"""Runs that are over and whose metrics are still told, the latest ones: a scraper is to see how they ended."""


class PerRun(Generic[M]):
    """One metric of all runs. What is counted of a run that is not told of any more goes where nobody looks."""

    def __init__(self, metric: M, labels: Mapping[str, Values], told: ToldRuns) -> None:
        self._metric: M = metric
        self._labels, self._told = labels, told
        self._nowhere: M = type(metric)("nowhere", "Of runs that ended long ago.", registry=None)

    def labels(self, run_id: str, *values: str) -> M:
        """What counts for a run."""
        return self._metric.labels(run_id, *values) if run_id in self._told else self._nowhere

    def begin(self, run_id: str) -> None:
        """0 for all that can happen in the run."""
        started(self._metric, self._labels, run_id)

    def forget(self, run_id: str) -> None:
        """No sample has the run's label any more."""
        self._metric.remove_by_labels({"run": run_id})


class ToldRuns:
    """Of which runs metrics are told."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._metrics: list[PerRun[Any]] = []
        self._told: set[str] = set()
        self._over: dict[str, float] = {}
        """When the runs ended that are over and told of."""

    def __contains__(self, run_id: object) -> bool:
        """Also from a scraper's thread."""
        return run_id in self._told

    def counter(self, name: str, meaning: str, /, **labels: Values) -> PerRun[Counter]:
        """As a Kit's, with the run before the other labels."""
        labels = {"run": ANY, **labels}
        return self._kept(PerRun(self._kit.counter(name, meaning, **labels), labels, self))

    def histogram(self, name: str, meaning: str, buckets: tuple[float, ...], /, **labels: Values) -> PerRun[Histogram]:
        """As a Kit's, with the run before the other labels."""
        labels = {"run": ANY, **labels}
        return self._kept(PerRun(self._kit.histogram(name, meaning, buckets, **labels), labels, self))

    def _kept(self, metric: PerRun[M]) -> PerRun[M]:
        self._metrics.append(metric)
        return metric

    def goes_on(self, run_id: str) -> None:
        """A run has begun, or was read back, or one that had ended was extended."""
        self._over.pop(run_id, None)
        if run_id not in self._told:
            self._told.add(run_id)
            for metric in self._metrics:
                metric.begin(run_id)

    def over(self, run_id: str, ended_at: float) -> None:
        """A run has ended. What was told of the runs that ended long before it is told no more."""
        self._told.add(run_id)
        self._over[run_id] = ended_at
        for old in sorted(self._over, key=self._over.__getitem__)[:-RUNS_KEPT]:
            del self._over[old]
            self._told.discard(old)
            for metric in self._metrics:
                metric.forget(old)
