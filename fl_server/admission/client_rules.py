"""The rules for what one client's update says of its work and its payloads, which follow from what it was assigned.

Weights follow from examples, and steps normalise deltas (FedNova, FedCM, SCAFFOLD): a client that could report any
number would choose its own weight.
Of a masked update its size, its digest and its header are checked. Its values say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fl_common.units import counted
from fl_server.admission.norms import UpdateContent
from fl_server.aggregation.updates import Decoding, Source, UpdateShape
from fl_server.run_settings.privacy import PrivacySection
from fl_server.run_settings.sections import LocalSection
from fl_server.store.errors import file_digest
from fl_tasks.batches import count_steps
from fl_tasks.metrics import wrong_name
from fl_tasks.own_loop import MAX_EPOCHS, MAX_METRICS, MAX_VALUE, most_steps
from protos.codec import Entry, Layout, LayoutError, digest_bytes, digest_text
from protos.encodings import PLAIN
from protos.fl.v1.training_pb2 import PayloadKind, RefusalReason, UpdateHeader
from protos.wire import MAX_PAYLOAD_NAME

_TIMES_TENSORS = 10
"""A manifest with this multiple of the model's tensors is refused without parsing them."""
_MOST_SHOWN = 16
"""Payloads of a wrong update that the refusal lists."""
_KEEP = "; parameters and buffers keep their shapes and types in training"
Epochs = Sequence[Mapping[str, float]]
"""The metrics of each epoch by name."""
_MAX_EXAMPLES = 2**53
"""Largest count that float64 represents exactly; weights are computed in it."""


class UpdateRefused(Exception):
    """The update will never count. `reason` is the wire's, the text says what was expected and what came."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class WrongDigest(UpdateRefused):
    """The bytes do not have the announced digest. A single case may be a fault of the disk or the network."""

    def __init__(self, expected: bytes, came: bytes) -> None:
        super().__init__(
            RefusalReason.REFUSAL_REASON_DIGEST,
            f"expected bytes with the digest {digest_text(expected)}, got {digest_text(came)}",
        )


@dataclass(frozen=True, slots=True)
class ExpectedWork:
    """The work of one client in one exchange."""

    examples: int
    """Examples that the client registered for the task."""
    local: LocalSection
    trains: bool
    """Whether the exchange trains. Nothing in a full gradient depends on the number of batches."""
    own_batches: int = 0
    """Batches of an epoch that the client registered, where its task makes the batches."""
    own_loop: bool = False
    """Whether the client trains with a loop of the task's own, which makes as many steps as it likes up to a limit."""

    def difference(self, examples: int, came: int) -> str:
        """The contradiction between the work and an update of so many examples and steps; empty if there is none."""
        if examples > self.examples:
            return (
                f"expected {counted(self.examples, 'example')} at most, as the client registered for the "
                f"task, got {examples}"
            )
        steps = self.steps(examples)
        if self.trains and self.own_loop:
            return "" if came <= steps else f"expected {counted(steps, 'step')} at most, got {came}"
        if self.trains and came != steps:
            return f"expected {counted(steps, 'step')}, as ordered for {counted(examples, 'example')}, got {came}"
        return ""

    def steps(self, examples: int) -> int:
        """K_i, the local steps of a client with this number of examples; with a loop of the task's, the most."""
        epochs = None if self.local.steps else self.local.epochs or 1
        size, steps = self.local.batch_size, self.local.steps
        if self.own_loop:
            return most_steps(examples, size, epochs=epochs, steps=steps)
        return count_steps(examples, size, epochs=epochs, steps=steps, own_batches=self.own_batches)


class RegisteredData(NamedTuple):
    """The training data that a client registered for a task."""

    examples: int = 0
    own_batches: int = 0
    """Batches of an epoch if the client's task makes them; 0 if the run's batch size applies."""


def registered_data(offer: Mapping[str, Any] | None) -> RegisteredData:
    """The data of a client's offer of a run's task; none without an offer."""
    if offer is None:
        return RegisteredData()
    return RegisteredData(int(offer["train_examples"]), int(offer.get("train_batches", 0)))


def wrong_work(ordered: ExpectedWork | None, examples: int, steps: int, epochs: Epochs) -> str:
    """What is wrong with what an update says of its client's work; empty if nothing is."""
    if not 1 <= examples <= _MAX_EXAMPLES or steps < 1:
        return f"expected 1 to {_MAX_EXAMPLES} examples and at least one step, got {examples} and {steps}"
    difference = "" if ordered is None else ordered.difference(examples, steps)
    return difference or wrong_epochs(epochs)


def wrong_privacy(wanted: PrivacySection, header: UpdateHeader) -> str:
    """Why an update is less private than its run, as its client says; empty if it is not."""
    came = header.privacy.applied
    if not header.HasField("privacy"):
        return "expected an update of private steps, got one that states no privacy: is the client's software older?"
    weaker = came.noise_multiplier < wanted.noise_multiplier or came.clip > wanted.clip or came.delta > wanted.delta
    if came.unit != wanted.unit or weaker:
        return (
            f"expected privacy of the unit {wanted.unit}, noise_multiplier {wanted.noise_multiplier:g}, clip"
            f" {wanted.clip:g} and delta {wanted.delta:g} or better, got {came.unit[:40]!r}, {came.noise_multiplier:g},"
            f" {came.clip:g} and {came.delta:g}"
        )
    return ""


def epochs_of(header: UpdateHeader) -> tuple[dict[str, float], ...]:
    """The metrics in a header."""
    return tuple(dict(epoch.values) for epoch in header.epochs)


def wrong_epochs(epochs: Epochs) -> str:
    """What is wrong with an update's metrics; empty if they are valid."""
    if len(epochs) > MAX_EPOCHS:
        return f"epochs: expected at most {MAX_EPOCHS}, got {len(epochs)}"
    for number, values in enumerate(epochs):
        if len(values) > MAX_METRICS:
            return f"epochs[{number}]: expected at most {MAX_METRICS} metrics, got {len(values)}"
        for name, value in values.items():
            if (rule := wrong_name(name)) is not None:
                return f"epochs[{number}]: expected {rule}, got {name[:100]!r}"
            if not abs(value) <= MAX_VALUE:
                return f"epochs[{number}], {name!r}: expected a finite value, got {value}"
    return ""


def mean_epochs(updates: Iterable[tuple[int, Epochs]]) -> tuple[dict[str, float], ...]:
    """Means over the examples of the updates that have a metric, by epoch and name. Their order changes no bit.

    updates: (n_i, the metrics of its epochs).
    """
    rows: list[dict[str, list[tuple[int, float]]]] = []
    for examples, epochs in updates:
        for number, values in enumerate(epochs):
            if number == len(rows):
                rows.append({})
            for name, value in values.items():
                rows[number].setdefault(name, []).append((examples, value))
    return tuple({name: _mean(row[name]) for name in sorted(row)} for row in rows)


def _mean(values: Sequence[tuple[int, float]]) -> float:
    return math.fsum(count * value for count, value in values) / sum(count for count, _ in values)


def check_payloads(header: UpdateHeader, expected: UpdateShape, max_bytes: int) -> None:
    """Check kinds, names and layouts of an update's payloads. Raises UpdateRefused."""
    came = [(payload.kind, payload.name) for payload in header.payloads]
    wanted = [(payload.kind, payload.name) for payload in expected.payloads]
    if came != wanted:
        raise UpdateRefused(
            RefusalReason.REFUSAL_REASON_LAYOUT,
            f"expected the payloads {_shown(wanted)}, got {_shown(came[:_MOST_SHOWN]) or 'nothing'}",
        )
    for payload, shape in zip(header.payloads, expected.payloads, strict=True):
        if payload.manifest == shape.manifest and shape.encoded.size_bytes <= max_bytes:
            continue  # exactly as expected; the code below finds the difference otherwise
        if shape.encoding != PLAIN:
            if difference := shape.encoded.difference_from(payload.manifest, max_bytes):
                raise UpdateRefused(RefusalReason.REFUSAL_REASON_LAYOUT, f"{shape.payload}: {difference}{_KEEP}")
            continue
        if (count := len(payload.manifest.tensors)) > _TIMES_TENSORS * len(shape.layout.entries):
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_LAYOUT,
                f"{shape.payload}: expected {counted(len(shape.layout.entries), 'tensor')}, got {count}",
            )
        try:
            layout = Layout.from_manifest(payload.manifest, 2**62)  # the difference is named, at any size
        except LayoutError as error:
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_LAYOUT, str(error)) from error
        if difference := shape.layout.difference(layout):
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_LAYOUT, f"{shape.payload}: {difference}{_KEEP}")


def _shown(payloads: Iterable[tuple[int, str]]) -> str:
    """Kinds and names of payloads. The names of an update are not trusted, so they are shortened."""
    known = PayloadKind.values()
    kinds = ((PayloadKind.Name(kind) if kind in known else str(kind), name) for kind, name in payloads)
    return ", ".join(
        kind.removeprefix("PAYLOAD_KIND_") + (f" {name[:MAX_PAYLOAD_NAME]!r}" if name else "") for kind, name in kinds
    )


@dataclass(frozen=True, slots=True)
class MaskedGate:
    """The rules for one client's masked update. It stands in place of `AdmissionGate`."""

    size_bytes: int

    def check_header(self, header: UpdateHeader) -> None:
        """All checks that need no bytes. Raises UpdateRefused."""
        kinds = [payload.kind for payload in header.payloads]
        if kinds != [PayloadKind.PAYLOAD_KIND_MASKED] or header.payloads[0].manifest.tensors:
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_LAYOUT,
                f"expected one payload of the kind MASKED without tensors, got the kinds {kinds[:8]}",
            )
        if header.size_bytes != self.size_bytes:
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_SIZE, f"expected {self.size_bytes} bytes, got {header.size_bytes}"
            )
        if header.HasField("training_loss") or header.epochs or (header.num_steps, header.num_examples) != (1, 1):
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_HEADER,
                "expected 1 for the examples and the steps, and no metrics, with secure aggregation: they are summed"
                " under the masks",
            )
        try:
            digest_bytes(header.digest)
        except ValueError as error:
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_DIGEST, str(error)) from error

    def read(self, path: Path, steps: int = 0) -> UpdateContent:
        """Read a whole update on disk for `check_content`. Raises StoreError."""
        del steps
        return UpdateContent(file_digest(path), ())

    @property
    def shape_read(self) -> UpdateShape | None:
        """None: no values are read."""
        return None

    @property
    def buffers_sent(self) -> list[Entry]:
        """None are known."""
        return []

    def decoding(self, steps: int) -> Decoding:
        """No values are read."""
        raise NotImplementedError(f"a masked update of {counted(steps, 'step')} has no values")

    def update_in(self, source: Source, steps: int = 0) -> Source:
        """See `AdmissionGate.update_in`."""
        del steps
        return source

    def check_content(self, update: Source, digest: bytes, content: UpdateContent) -> dict[str, float]:
        """Check a whole update that was read. Its norm is 0: nobody knows it. Raises WrongDigest."""
        del update
        if content.digest != digest:
            raise WrongDigest(digest, content.digest)
        return {"masked": 0.0}

    def clip_factor(self, norm: float) -> float:
        """The factor of the update: the device has clipped it."""
        del norm
        return 1.0
