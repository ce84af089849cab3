"""Every metric of the daemon, declared once, in a registry of its own.

A scrape is answered in threads of the metrics server. The one thread that trains is never asked for anything: it counts
its steps, and all else is told by the event loop, or looked up by whoever scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from fl_client.device import describe
from fl_client.errors import ConfigError
from protos.fl.v1.coordinator_pb2 import FailureReason
from protos.fl.v1.training_pb2 import UpdateHeader
from protos.metrics import ANY, Kit, listening

REASONS = tuple(name.removeprefix("FAILURE_REASON_").lower() for name in FailureReason.keys()[1:])
"""Why an assignment can fail."""

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class Metrics:
    """What a device owner watches. No client id as a label: the scrape target says it."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.kit = Kit(self.registry)
        self._about_work()
        self._about_the_coordinator()
        self._about_the_device()

    def _about_work(self) -> None:
        kit = self.kit
        self.trained = kit.counter("fl_client_rounds_trained", "Updates computed.")
        self.training_seconds = kit.histogram(
            "fl_client_training_seconds", "Seconds of local training for one update.", _SECONDS
        )
        self.steps = kit.counter("fl_client_training_steps", "Local mini-batch steps made.")
        self.loss = kit.latest("fl_client_training_loss", "Mean training loss of the newest update.")
        self.receipts = kit.counter(
            "fl_client_updates", "Updates, by the coordinator's word on them.", result=("admitted", "refused")
        )
        self.last_update = kit.latest(
            "fl_client_last_update_timestamp_seconds", "Time at which the coordinator last admitted an update."
        )
        self.failures = kit.counter("fl_client_work_failures", "Assignments not done, by why.", reason=REASONS)

    def _about_the_coordinator(self) -> None:
        kit = self.kit
        self.attached = kit.gauge("fl_client_attached", "1 while the coordinator's stream is open, else 0.")
        self.connects = kit.counter(
            "fl_client_connection_attempts", "Tries to reach the coordinator.", result=("attached", "failed")
        )
        self.certificate_expiry = kit.gauge(
            "fl_client_certificate_expiry_timestamp_seconds",
            "When what TLS is made with ends: cert, this device's own; ca, the last of the coordinator's.",
            file=("cert", "ca"),
        )
        self.ignored = kit.counter(
            "fl_client_events_ignored", "Events of the coordinator that named nothing that could be answered for."
        )
        self.bytes = kit.counter("fl_client_transfer_bytes", "Tensor bytes, by direction.", direction=("down", "up"))

    def _about_the_device(self) -> None:
        kit = self.kit
        self.may_train = kit.latest("fl_client_may_train", "1 while no gate forbids training, else 0.")
        self.gate_closed = kit.gauge(
            "fl_client_gate_closed", "1 while this gate is closed, else 0; only gates that are configured.",
            gate=("window", "gpu", "power", "temperature"),
        )  # fmt: skip
        self._examples = kit.latest("fl_client_examples", "Training examples of this device's shard.")
        self._device = kit.gauge(
            "fl_client_device_info", "What the device trains on, and its maker's name; always 1.", device=ANY, name=ANY
        )
        self._memory = kit.gauge(
            "fl_client_device_memory_bytes", "Memory of a CUDA device: in tensors, and held by torch for them.",
            kind=("allocated", "reserved"),
        )  # fmt: skip
        self._space = kit.space("fl_client_state_dir")
        kit.build("fl_client_build_info")
        kit.process()

    def about(self, device: torch.device, examples: int, state_dir: Path) -> None:
        """What was found at the start; memory and disk are looked up whenever somebody asks."""
        self._examples.set(examples)
        self._device.labels(str(device), describe(device).name).set(1)
        self._space.look_at(state_dir)
        if device.type == "cuda":
            self._memory.labels("allocated").set_function(partial(torch.cuda.memory_allocated, device))
            self._memory.labels("reserved").set_function(partial(torch.cuda.memory_reserved, device))

    def computed(self, header: UpdateHeader) -> None:
        """An update was made."""
        self.trained.inc()
        self.training_seconds.observe(header.training_seconds)
        if header.HasField("training_loss"):
            self.loss.set(header.training_loss)

    def admitted(self) -> None:
        """The coordinator has taken an update."""
        self.receipts.labels("admitted").inc()
        self.last_update.set(time.time())

    def received(self, count: int) -> None:
        """Tensor bytes that came down."""
        self.bytes.labels("down").inc(count)

    def sent(self, count: int) -> None:
        """Tensor bytes that went up."""
        self.bytes.labels("up").inc(count)

    @contextmanager
    def listening(self, host: str, port: int) -> Iterator[None]:
        """Serve /metrics meanwhile. Raises ConfigError when the address cannot be had."""
        with ExitStack() as held:
            try:
                held.enter_context(listening(self.registry, host, port))
            except OSError as error:
                raise ConfigError(
                    f"metrics_listen: expected a free address, got {host}:{port}: {error.strerror}"
                ) from None
            yield
