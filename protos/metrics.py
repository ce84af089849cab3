"""How both processes declare and serve their metrics: each once, with its meaning and the values its labels can have.

Names and types follow Prometheus' conventions: base units, `_total` behind counters, no client's id as a label. What
is declared here is what docs/metrics.md lists, and what starts at 0, so that a rate sees the first event too.
"""

from __future__ import annotations

import math
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Literal, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from protos.metrics_port import SERVING, MetricsPort, Serving
from protos.wire import PROTOCOL_MAX

Values = tuple[str, ...]
ANY: Values = ()
"""The values of a label that nobody knows beforehand: runs, a task's metrics."""
M = TypeVar("M", Counter, Gauge, Histogram)

# A second series for each counter would say when it began: process_start_time_seconds says so once.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Declaration:
    """What stands of a metric on its page."""

    name: str
    """As it is queried; a histogram's without _bucket, _sum and _count."""
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: Mapping[str, Values]


class Kit:
    """Declares metrics on a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.declared: list[Declaration] = []

    def counter(self, name: str, meaning: str, only: Sequence[Values] = (), /, **labels: Values) -> Counter:
        """Something that only grows; `name` without `_total`. only: what can stand together, where not all can."""
        self.declare(Declaration(f"{name}_total", "counter", meaning, labels))
        counter = Counter(name, meaning, labels, registry=self.registry)
        for values in only:
            counter.labels(*values)
        return counter if only else started(counter, labels)

    def gauge(self, name: str, meaning: str, /, **labels: Values) -> Gauge:
        """Something that is so now; with labels it has no value before it is set."""
        self.declare(Declaration(name, "gauge", meaning, labels))
        return Gauge(name, meaning, labels, registry=self.registry)

    def histogram(self, name: str, meaning: str, buckets: Sequence[float], /, **labels: Values) -> Histogram:
        """How often what size came."""
        self.declare(Declaration(name, "histogram", meaning, labels))
        return started(Histogram(name, meaning, labels, registry=self.registry, buckets=buckets), labels)

    def declare(self, declaration: Declaration) -> None:
        """Something that is on the registry, or comes there by a collector."""
        self.declared.append(declaration)

    def build(self, name: str) -> None:
        """What runs here, in the labels of a gauge that is always 1."""
        facts = {
            "version": installed("impetus-fl"),
            "python": platform.python_version(),
            "torch": installed("torch"),
            "grpc": installed("grpcio"),
            "protocol": str(PROTOCOL_MAX),
        }
        meaning = "Versions of what runs here, and the newest protocol that it speaks; always 1."
        self.gauge(name, meaning, **dict.fromkeys(facts, ANY)).labels(*facts.values()).set(1)

    def process(self) -> None:
        """CPU, memory, files and start of the process, and its garbage collector, by Prometheus' own collectors."""
        for collector in (ProcessCollector(registry=self.registry), GCCollector(registry=self.registry)):
            for family in collector.collect():
                labels = {name: ANY for sample in family.samples for name in sample.labels}
                name = f"{family.name}_total" if family.type == "counter" else family.name
                kind: Literal["counter", "gauge"] = "counter" if family.type == "counter" else "gauge"
                self.declare(Declaration(name, kind, f"{family.documentation.rstrip('.')}.", labels))

    def latest(self, name: str, meaning: str, /) -> Latest:
        """A gauge that is not there before it is known."""
        self.declare(Declaration(name, "gauge", meaning, {}))
        return Latest(name, meaning, self.registry)

    def space(self, prefix: str) -> Space:
        """Room on the file system of a state directory."""
        return Space(
            self.latest(f"{prefix}_available_bytes", "Bytes free for us on the state directory's file system."),
            self.latest(f"{prefix}_size_bytes", "Bytes of the state directory's file system."),
        )


class Latest(Collector):
    """A gauge without labels, and without a sample until it has a value: 0 would be a lie."""

    def __init__(self, name: str, meaning: str, registry: CollectorRegistry) -> None:
        self._name, self._meaning = name, meaning
        self._look: Callable[[], float] | None = None
        registry.register(self)

    def set(self, value: float) -> None:
        """It is known."""
        self._look = lambda: value

    def set_function(self, look: Callable[[], float]) -> None:
        """It is looked up whenever somebody asks, in a thread of his."""
        self._look = look

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The name only."""
        yield GaugeMetricFamily(self._name, self._meaning)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called in a scraper's thread."""
        family, look = GaugeMetricFamily(self._name, self._meaning), self._look
        if look is not None:
            family.add_metric([], look())
        yield family


@dataclass(frozen=True, slots=True)
class Space:
    """Room on a file system, looked up when somebody asks: it costs nobody else anything."""

    available: Latest
    size: Latest

    def look_at(self, folder: Path) -> None:
        """The folder whose file system is meant."""
        self.available.set_function(partial(_bytes, folder, lambda found: found.f_bavail))
        self.size.set_function(partial(_bytes, folder, lambda found: found.f_blocks))


def started(metric: M, labels: Mapping[str, Values], *first: str) -> M:
    """The metric with a 0 for all that its labels can say, as far as that is known; `first`: its leading labels."""
    behind = list(labels.values())[len(first) :]
    if labels and all(behind):
        for values in product(*behind):
            metric.labels(*first, *values)
    return metric


def installed(package: str) -> str:
    """A package's version; "unpackaged" where it runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unpackaged"


def _bytes(folder: Path, blocks: Callable[[os.statvfs_result], int]) -> float:
    try:
        found = os.statvfs(folder)
    except OSError:
        return math.nan  # the other metrics are told all the same
    return float(blocks(found) * found.f_frsize)


@contextmanager
def listening(registry: CollectorRegistry, host: str, port: int, limits: Serving = SERVING) -> Iterator[int]:
    """Serve /metrics meanwhile, in one thread; gives the port. Raises OSError when it cannot be had."""
    server = MetricsPort(make_wsgi_app(registry), (host, port), limits)
    thread = threading.Thread(target=server.serve, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.port
    finally:
        server.close()
        thread.join()
