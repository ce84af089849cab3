"""Declaring and serving Prometheus metrics, for both programs.

Each metric is declared once, with its meaning and the values of its labels. docs/operation/metrics.md is generated from
these declarations. Names follow Prometheus' conventions: base units, `_total` for counters, no client id as a label.
Metrics whose label values are known start at 0, so that a rate includes the first event.
"""

from __future__ import annotations

import math
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

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

from fl_common.certificates.leaf import Period
from fl_common.metrics_server import DEFAULT_LIMITS, MetricsServer, ServerLimits, WsgiApp

Values = tuple[str, ...]
ANY: Values = ()
"""Values of a label that are not known in advance, such as run ids."""
M = TypeVar("M", Counter, Gauge, Histogram)

# Without this each counter has a second series with its start time, which process_start_time_seconds has already.
disable_created_metrics()


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric as it appears on the metrics page."""

    name: str
    """The name as in a query; a histogram's without _bucket, _sum and _count."""
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: Mapping[str, Values]


class MetricFactory:
    """Declares metrics on a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.declared: list[Declaration] = []

    def counter(self, name: str, meaning: str, only: Sequence[Values] = (), /, **labels: Values) -> Counter:
        """A counter; `name` without `_total`. only: the label combinations that occur, where not all do."""
        self.declare(Declaration(f"{name}_total", "counter", meaning, labels))
        counter = Counter(name, meaning, labels, registry=self.registry)
        for values in only:
            counter.labels(*values)
        return counter if only else with_zeros(counter, labels)

    def gauge(self, name: str, meaning: str, /, **labels: Values) -> Gauge:
        """A gauge; with labels it has no sample before it is set."""
        self.declare(Declaration(name, "gauge", meaning, labels))
        return Gauge(name, meaning, labels, registry=self.registry)

    def histogram(self, name: str, meaning: str, buckets: Sequence[float], /, **labels: Values) -> Histogram:
        """A histogram with these upper bounds."""
        self.declare(Declaration(name, "histogram", meaning, labels))
        return with_zeros(Histogram(name, meaning, labels, registry=self.registry, buckets=buckets), labels)

    def declare(self, declaration: Declaration) -> None:
        """Add a metric that a collector exports to the declared ones."""
        self.declared.append(declaration)

    def build_info(self, name: str, protocol: int) -> None:
        """A gauge that is always 1, with the versions of program and libraries in its labels."""
        facts = {
            "version": package_version("impetus-fl"),
            "python": platform.python_version(),
            "torch": package_version("torch"),
            "grpc": package_version("grpcio"),
            "protocol": str(protocol),
        }
        meaning = "Versions of the program and its libraries, and the newest protocol version; always 1."
        self.gauge(name, meaning, **dict.fromkeys(facts, ANY)).labels(*facts.values()).set(1)

    def process_metrics(self) -> None:
        """Prometheus' own collectors: CPU, memory, open files, start time and garbage collection of the process."""
        for collector in (ProcessCollector(registry=self.registry), GCCollector(registry=self.registry)):
            for family in collector.collect():
                labels = {name: ANY for sample in family.samples for name in sample.labels}
                name = f"{family.name}_total" if family.type == "counter" else family.name
                kind: Literal["counter", "gauge"] = "counter" if family.type == "counter" else "gauge"
                self.declare(Declaration(name, kind, f"{family.documentation.rstrip('.')}.", labels))

    def optional_gauge(self, name: str, meaning: str, /) -> OptionalGauge:
        """A gauge without a sample until it is set."""
        self.declare(Declaration(name, "gauge", meaning, {}))
        return OptionalGauge(name, meaning, self.registry)

    def certificates(self, prefix: str, meaning: str, *files: str) -> CertificateValidity:
        """End and lifetime of the certificates of these files."""
        return CertificateValidity(
            self.gauge(f"{prefix}_expiry_timestamp_seconds", meaning, file=files),
            self.gauge(
                f"{prefix}_lifetime_seconds",
                f"From the begin to the end of the certificate that {prefix}_expiry_timestamp_seconds shows.",
                file=files,
            ),
        )

    def disk_space(self, prefix: str) -> DiskSpace:
        """Free and total bytes of the state directory's file system."""
        return DiskSpace(
            self.optional_gauge(f"{prefix}_available_bytes", "Bytes free for us on the state directory's file system."),
            self.optional_gauge(f"{prefix}_size_bytes", "Bytes of the state directory's file system."),
        )


@dataclass(frozen=True)
class CertificateValidity:
    """Gauges of the certificates of a process, by file. An alert compares the time left with the lifetime."""

    expiry: Gauge
    lifetime: Gauge

    def show(self, periods: Mapping[str, Period]) -> None:
        """Export when the certificates of these files are valid."""
        for file, period in periods.items():
            self.expiry.labels(file).set(period.ends.timestamp())
            self.lifetime.labels(file).set(period.seconds)


class OptionalGauge(Collector):
    """A gauge without labels. It has no sample until it is set, because 0 would be wrong."""

    def __init__(self, name: str, meaning: str, registry: CollectorRegistry) -> None:
        self._name, self._meaning = name, meaning
        self._read: Callable[[], float] | None = None
        registry.register(self)

    def set(self, value: float) -> None:
        """Export this value."""
        self._read = lambda: value

    def set_function(self, read: Callable[[], float]) -> None:
        """Call `read` at every scrape, in the scraper's thread."""
        self._read = read

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """The family without samples, for the registry."""
        yield GaugeMetricFamily(self._name, self._meaning)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The family at a scrape, in the scraper's thread."""
        family, read = GaugeMetricFamily(self._name, self._meaning), self._read
        if read is not None:
            family.add_metric([], read())
        yield family


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Bytes of a file system, read at each scrape."""

    available: OptionalGauge
    size: OptionalGauge

    def watch(self, folder: Path) -> None:
        """Report the file system of this folder."""
        self.available.set_function(partial(_bytes, folder, lambda file_system: file_system.f_bavail))
        self.size.set_function(partial(_bytes, folder, lambda file_system: file_system.f_blocks))


def with_zeros(metric: M, labels: Mapping[str, Values], *first: str) -> M:
    """The metric with a 0 for each combination of its labels' known values. first: values of its leading labels."""
    remaining = list(labels.values())[len(first) :]
    if labels and all(remaining):
        for values in product(*remaining):
            metric.labels(*first, *values)
    return metric


@cache
def package_version(package: str) -> str:
    """The version of an installed package; "unpackaged" for one that runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unpackaged"


def _bytes(folder: Path, blocks: Callable[[os.statvfs_result], int]) -> float:
    try:
        system = os.statvfs(folder)
    except OSError:
        return math.nan  # the other metrics are still exported
    return float(blocks(system) * system.f_frsize)


@contextmanager
def serve_metrics(
    registry: CollectorRegistry,
    address: tuple[str, int],
    limits: ServerLimits = DEFAULT_LIMITS,
    is_ready: Callable[[], bool] | None = None,
) -> Iterator[int]:
    """Serve /metrics in a thread within the context. Yields the port. Raises OSError if the port cannot be opened.

    is_ready: the answer of /ready, 200 or 503; None: there is no such page.
    """
    app = make_wsgi_app(registry)
    server = MetricsServer(app if is_ready is None else _with_readiness(app, is_ready), address, limits)
    thread = threading.Thread(target=server.serve, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.port
    finally:
        server.close()
        thread.join()


def _with_readiness(metrics: WsgiApp, is_ready: Callable[[], bool]) -> WsgiApp:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/ready":
            return metrics(environ, start_response)
        ready = is_ready()
        start_response("200 OK" if ready else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ready\n" if ready else b"refused by the coordinator: see the log\n"]

    return answer
