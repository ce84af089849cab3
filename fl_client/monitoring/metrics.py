"""All metrics of the daemon, in a registry of its own.

Threads of the metrics server answer scrapes. The training thread only counts its steps. The event loop sets the other
values, or a scrape reads them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from fl_client.errors import ConfigError
from fl_client.settings.device import describe
from fl_common.metrics import ANY, MetricFactory, serve_metrics
from protos.fl.v1.coordinator_pb2 import FailureReason, ReleaseOutcome
from protos.fl.v1.training_pb2 import UpdateHeader
from protos.wire import PROTOCOL_MAX

REASONS = tuple(name.removeprefix("FAILURE_REASON_").lower() for name in FailureReason.keys()[1:])
"""Reasons for which an assignment can fail."""

OUTCOMES = tuple(name.removeprefix("RELEASE_OUTCOME_").lower() for name in ReleaseOutcome.keys()[1:])
"""What can become of a released model."""

POLICY_RULES = (
    "coordinators", "tasks", "algorithms", "work", "day", "privacy", "secure_aggregation", "share", "unknown_demands",
)  # fmt: skip
"""Rules of a site's policy by which work or a coordinator can be refused. Outside its hours a device is not asked."""

DAY_AMOUNTS = ("assignments", "steps", "examples", "seconds", "bytes_down", "bytes_up")
"""What a site's policy may limit for a day."""

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class Metrics:
    """The metrics for a device's owner. No label has the client id: the scrape target identifies it."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.factory = MetricFactory(self.registry)
        self._declare_work()
        self._declare_policy()
        self._declare_connection()
        self._declare_device()

    def _declare_work(self) -> None:
        factory = self.factory
        self.trained = factory.counter("fl_client_rounds_trained", "Updates computed.")
        self.training_seconds = factory.histogram(
            "fl_client_training_seconds", "Seconds of local training for one update.", _SECONDS
        )
        self.steps = factory.counter("fl_client_training_steps", "Local mini-batch steps made.")
        self.loss = factory.optional_gauge("fl_client_training_loss", "Mean training loss of the newest update.")
        self.releases = factory.counter(
            "fl_client_releases", "Reports about released models, by what became of them.", outcome=OUTCOMES
        )
        self.receipts = factory.counter(
            "fl_client_updates", "Updates, by the coordinator's verdict.", result=("admitted", "refused")
        )
        self.last_update = factory.optional_gauge(
            "fl_client_last_update_timestamp_seconds", "Time at which the coordinator last admitted an update."
        )
        self.audit_rows = factory.counter(
            "fl_client_audit_rows",
            "Rows of the device's audit log; rows are left out when the disk is full or above a rate.",
            outcome=("written", "left_out"),
        )
        self.failures = factory.counter(
            "fl_client_work_failures", "Assignments that failed, by reason.", reason=REASONS
        )

    def _declare_policy(self) -> None:
        self.policy_refusals = self.factory.counter(
            "fl_client_policy_refusals",
            "Assignments, and connections to a coordinator, that the site's policy refused, by rule.",
            rule=POLICY_RULES,
        )
        self.day_used = self.factory.gauge(
            "fl_client_policy_day_used", "Work of the current day, which the site's policy may limit.",
            amount=DAY_AMOUNTS,
        )  # fmt: skip

        self.privacy_spent = self.factory.optional_gauge(
            "fl_client_privacy_epsilon", "Epsilon that this device's data has spent over all runs with privacy."
        )

    def _declare_connection(self) -> None:
        factory = self.factory
        self.attached = factory.gauge("fl_client_attached", "1 while the coordinator's stream is open, else 0.")
        self.refused = factory.gauge(
            "fl_client_refused",
            "1 while the coordinator refuses this device: it is banned, or its certificate is revoked; else 0.",
        )
        self.connects = factory.counter(
            "fl_client_connection_attempts", "Tries to reach the coordinator.", result=("attached", "failed")
        )
        self.certificates = factory.certificates(
            "fl_client_certificate",
            "Expiry of TLS certificates: cert, this device's own; ca, the last of the trusted CAs.",
            "cert",
            "ca",
        )
        self.renewals = factory.counter(
            "fl_client_certificate_renewals", "Tries to renew this device's certificate at the coordinator.",
            result=("renewed", "failed", "refused"),
        )  # fmt: skip
        self.ignored = factory.counter("fl_client_events_ignored", "Events of the coordinator that were not valid.")
        self.bytes = factory.counter(
            "fl_client_transfer_bytes", "Tensor bytes, by direction.", direction=("down", "up")
        )

    def _declare_device(self) -> None:
        factory = self.factory
        self.may_train = factory.optional_gauge("fl_client_may_train", "1 while no gate forbids training, else 0.")
        self.gate_closed = factory.gauge(
            "fl_client_gate_closed", "1 while this gate is closed, else 0; only gates that are configured.",
            gate=("window", "gpu", "power", "temperature", "policy"),
        )  # fmt: skip
        self._examples = factory.optional_gauge("fl_client_examples", "Training examples of this device's shard.")
        self._device = factory.gauge(
            "fl_client_device_info", "The training device and its product name; always 1.", device=ANY, name=ANY
        )
        self._memory = factory.gauge(
            "fl_client_device_memory_bytes", "Memory of a CUDA device: allocated by tensors, and reserved by torch.",
            kind=("allocated", "reserved"),
        )  # fmt: skip
        self._space = factory.disk_space("fl_client_state_dir")
        self.state_dir_usable = factory.optional_gauge(
            "fl_client_state_dir_usable", "1 while the state directory can be used; at 0 the device takes no work."
        )
        factory.build_info("fl_client_build_info", PROTOCOL_MAX)
        factory.process_metrics()

    def set_device(self, device: torch.device, examples: int, state_dir: Path) -> None:
        """Set what is known at the start. Each scrape reads memory and disk."""
        self._examples.set(examples)
        self._device.labels(str(device), describe(device).name).set(1)
        self._space.watch(state_dir)
        if device.type == "cuda":
            self._memory.labels("allocated").set_function(partial(torch.cuda.memory_allocated, device))
            self._memory.labels("reserved").set_function(partial(torch.cuda.memory_reserved, device))

    def update_trained(self, header: UpdateHeader) -> None:
        """Count an update that was computed."""
        self.trained.inc()
        self.training_seconds.observe(header.training_seconds)
        if header.HasField("training_loss"):
            self.loss.set(header.training_loss)

    def update_admitted(self) -> None:
        """Count an update that the coordinator has admitted."""
        self.receipts.labels("admitted").inc()
        self.last_update.set(time.time())

    def bytes_received(self, count: int) -> None:
        """Count downloaded tensor bytes."""
        self.bytes.labels("down").inc(count)

    def bytes_sent(self, count: int) -> None:
        """Count uploaded tensor bytes."""
        self.bytes.labels("up").inc(count)

    def is_ready(self) -> bool:
        """Whether the coordinator does not refuse this device. One that cannot be reached changes nothing."""
        return not self.registry.get_sample_value("fl_client_refused")

    @contextmanager
    def serve(self, host: str, port: int) -> Iterator[None]:
        """Serve /metrics, and /ready for a probe. Raises ConfigError when the address is not free."""
        with ExitStack() as held:
            try:
                held.enter_context(serve_metrics(self.registry, (host, port), is_ready=self.is_ready))
            except OSError as error:
                raise ConfigError(
                    f"metrics_listen: expected a free address, got {host}:{port}: {error.strerror}"
                ) from None
            yield
