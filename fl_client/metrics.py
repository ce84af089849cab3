"""Every metric of the daemon, declared once, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from fl_client.errors import ConfigError


class Metrics:
    """What a device owner watches. No client id as a label: the scrape target says it."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        make: dict[str, Any] = {"namespace": "fl_client", "registry": self.registry}
        self.trained = Counter("rounds_trained", "Updates computed", **make)
        self.training_seconds = Histogram(
            "training_seconds", "Seconds of local training for one update", buckets=_SECONDS, **make
        )
        self.steps = Counter("training_steps", "Local mini-batch steps made", **make)
        self.receipts = Counter("updates", "Updates by the coordinator's word on them", ["result"], **make)
        self.bytes = Counter("transfer_bytes", "Tensor bytes by direction", ["direction"], **make)
        self.attached = Gauge("attached", "1 while the coordinator's stream is open, else 0", **make)
        self.connects = Counter("connection_attempts", "Tries to reach the coordinator, by result", ["result"], **make)
        self.certificate_expiry = Gauge(
            "certificate_expiry_timestamp_seconds",
            "When what TLS is made with ends: cert, this device's own; ca, the last of the coordinator's",
            ["file"],
            **make,
        )
        self.failures = Counter("work_failures", "Assignments that could not be done, by reason", ["reason"], **make)
        self.may_train = Gauge("may_train", "1 while no gate forbids training, else 0", **make)
        self.gate_closed = Gauge("gate_closed", "1 while this gate is closed, else 0", ["gate"], **make)

    def received(self, count: int) -> None:
        """Tensor bytes that came down."""
        self.bytes.labels("down").inc(count)

    def sent(self, count: int) -> None:
        """Tensor bytes that went up."""
        self.bytes.labels("up").inc(count)

    @contextmanager
    def listening(self, host: str, port: int) -> Iterator[None]:
        """Serve /metrics meanwhile. Raises ConfigError when the address cannot be had."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigError(f"metrics_listen: expected a free address, got {host}:{port}: {error.strerror}") from None
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
