"""Metrics with a label `run`. They are reported for running runs and the latest ended ones, so that they stay few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from prometheus_client import Counter, Histogram

from fl_common.metrics import ANY, MetricFactory, Values, with_zeros

M = TypeVar("M", Counter, Histogram)

RUNS_KEPT = 20
"""Ended runs whose metrics are still reported, the latest ones, so that a scraper sees how they ended."""


class PerRun(Generic[M]):
    """One metric of all runs. Counts of a run that is not reported any more are discarded."""

    def __init__(self, metric: M, labels: Mapping[str, Values], reported: ReportedRuns) -> None:
        self._metric: M = metric
        self._labels, self._reported = labels, reported
        self._discarded: M = type(metric)("nowhere", "Of runs that ended long ago.", registry=None)

    def labels(self, run_id: str, *values: str) -> M:
        """The metric of a run."""
        return self._metric.labels(run_id, *values) if run_id in self._reported else self._discarded

    def start(self, run_id: str) -> None:
        """Report 0 for every combination of labels that is known beforehand."""
        with_zeros(self._metric, self._labels, run_id)

    def remove(self, run_id: str) -> None:
        """Remove all samples of the run."""
        self._metric.remove_by_labels({"run": run_id})


class ReportedRuns:
    """The runs that metrics are reported for."""

    def __init__(self, factory: MetricFactory) -> None:
        self._factory = factory
        self._metrics: list[PerRun[Any]] = []
        self._reported: set[str] = set()
        self._ended: dict[str, float] = {}
        """When those of them ended that are over."""

    def __contains__(self, run_id: object) -> bool:
        """Also from a scraper's thread."""
        return run_id in self._reported

    def counter(self, name: str, meaning: str, /, **labels: Values) -> PerRun[Counter]:
        """A MetricFactory's counter with the label `run` before the others."""
        labels = {"run": ANY, **labels}
        return self._kept(PerRun(self._factory.counter(name, meaning, **labels), labels, self))

    def histogram(self, name: str, meaning: str, buckets: tuple[float, ...], /, **labels: Values) -> PerRun[Histogram]:
        """A MetricFactory's histogram with the label `run` before the others."""
        labels = {"run": ANY, **labels}
        return self._kept(PerRun(self._factory.histogram(name, meaning, buckets, **labels), labels, self))

    def _kept(self, metric: PerRun[M]) -> PerRun[M]:
        self._metrics.append(metric)
        return metric

    def started(self, run_id: str) -> None:
        """A run was created, restored or extended."""
        self._ended.pop(run_id, None)
        if run_id not in self._reported:
            self._reported.add(run_id)
            for metric in self._metrics:
                metric.start(run_id)

    def removed(self, run_id: str) -> None:
        """A run was deleted."""
        self._ended.pop(run_id, None)
        if run_id in self._reported:
            self._reported.discard(run_id)
            for metric in self._metrics:
                metric.remove(run_id)

    def ended(self, run_id: str, ended_at: float) -> None:
        """A run has ended. Runs that ended long before it are not reported any more."""
        self._reported.add(run_id)
        self._ended[run_id] = ended_at
        for old in sorted(self._ended, key=self._ended.__getitem__)[:-RUNS_KEPT]:
            del self._ended[old]
            self._reported.discard(old)
            for metric in self._metrics:
                metric.remove(old)
