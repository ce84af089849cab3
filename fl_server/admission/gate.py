"""The admission gate: the checks of an update before it can enter a sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from fl_server.admission.buffer_rules import BufferFacts, BufferRules, most_counted
from fl_server.admission.client_rules import (
    Epochs,
    ExpectedWork,
    RegisteredData,
    UpdateRefused,
    WrongDigest,
    check_payloads,
    wrong_privacy,
    wrong_work,
)
from fl_server.admission.norms import (
    BUFFERS,
    DELTA,
    FARTHEST,
    FLOOR,
    NO_LIMIT,
    NormHistory,
    RelativeNorm,
    UpdateContent,
    read_update,
)
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import learning_rate_in, local_in
from fl_server.aggregation.privacy import ROUNDED
from fl_server.aggregation.snapshot import Snapshot
from fl_server.aggregation.updates import (
    FILES,
    Decoding,
    EncodedUpdate,
    PayloadShape,
    Source,
    UpdateKeys,
    UpdateShape,
    buffers_in,
)
from fl_server.run_settings.privacy import PrivacySection
from protos.codec import Entry, LayoutError, digest_bytes
from protos.fl.v1.training_pb2 import RefusalReason, UpdateHeader


@dataclass(frozen=True)
class AdmissionGate:
    """The rules for one client's update of an exchange."""

    shape: UpdateShape
    max_bytes: int
    max_norm: float
    """Largest L2 norm of a delta's trainable part; 0: any finite norm."""
    clip_norm: float
    """Norm to which a longer delta is scaled down; 0: no scaling."""
    state_epoch: int
    relative: RelativeNorm = NO_LIMIT
    """Limit relative to earlier updates, to refuse a longer delta or to scale it down."""
    others: Mapping[str, RelativeNorm] = field(default_factory=dict)
    """Relative limits of the other payloads, by name; a longer vector is refused."""
    farthest: Mapping[str, float] = field(default_factory=dict)
    """Norms that no training reaches, by payload; a longer vector is refused, also before others are known."""
    ordered: ExpectedWork | None = None
    """The assigned work; None: the header is not compared with it."""
    buffers: BufferRules = field(default_factory=BufferRules)
    privacy: PrivacySection | None = None
    """What the run demands of the client's steps; None: nothing."""
    clips_itself: bool = False
    """Whether the client was asked to scale its delta to `clip_norm`. One that is longer than rounding explains is
    refused."""
    decoding: Callable[[int], Decoding] = lambda _: Decoding(UpdateKeys(0, 0))
    """How the client's update is decoded, by its number of steps, K_i."""

    def check_header(self, header: UpdateHeader) -> None:
        """All checks that need no tensor bytes. Raises UpdateRefused."""
        self.check_work(header.num_examples, header.num_steps, [epoch.values for epoch in header.epochs])
        self.check_form(header)

    def check_work(self, examples: int, steps: int, epochs: Epochs) -> None:
        """Check what an update says of its client's work: n_i, K_i and metrics. Raises UpdateRefused."""
        if wrong := wrong_work(self.ordered, examples, steps, epochs):
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_HEADER, wrong)

    def check_form(self, header: UpdateHeader) -> None:
        """Check the rest of a header, which clients in lockstep have in common. Raises UpdateRefused."""
        if header.state_epoch != self.state_epoch:
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_STATE_EPOCH,
                f"expected client state of epoch {self.state_epoch}, got {header.state_epoch}: it restarts from zero",
            )
        if self.privacy is not None and (wrong := wrong_privacy(self.privacy, header)):
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_HEADER, wrong)
        check_payloads(header, self.shape, self.max_bytes)
        if header.size_bytes != self.shape.size_bytes or header.size_bytes > self.max_bytes:
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_SIZE,
                f"expected {self.shape.size_bytes} bytes (limit {self.max_bytes}), got {header.size_bytes}",
            )
        try:
            digest_bytes(header.digest)
        except ValueError as error:
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_DIGEST, str(error)) from error

    def clip_factor(self, norm: float) -> float:
        """The factor for a delta of this norm."""
        return min(1.0, self._clipped_to / norm) if norm > self._clipped_to else 1.0

    @cached_property
    def _clipped_to(self) -> float:
        """The norm to which a longer delta is scaled down."""
        clips = self.relative.clips and self.shape.trains
        limits = (self.clip_norm, self.relative.limit if clips else 0.0)
        return min((limit for limit in limits if limit), default=math.inf)

    def check_file(self, path: Path, digest: bytes, steps: int = 0) -> dict[str, float]:
        """Check a whole update on disk; returns the L2 norms of its vectors, the first payload's first.

        A payload's norm is that of its trainable part; "buffers" is the distance of the buffers from those sent. A norm
        includes every value, so it also finds NaN. Raises WrongDigest, UpdateRefused.

        steps: K_i of the header; only for encoded updates.
        """
        return self.check_content(self.update_in(path, steps), digest, self.read(path, steps))

    @property
    def shape_read(self) -> UpdateShape | None:
        """The shape of the values that `read` reads."""
        return self.shape

    @property
    def buffers_sent(self) -> list[Entry]:
        """The buffers among its values, by rising offset; empty without any."""
        return buffers_in(self.shape)

    def update_in(self, source: Source, steps: int = 0) -> Source:
        """An update whose values can be read, from its bytes. steps: as above."""
        if self.shape.plain or not isinstance(source, FILES):
            return source
        return EncodedUpdate(source, self.shape, self.decoding(steps))

    def read(self, path: Path, steps: int = 0) -> UpdateContent:
        """Read a whole update on disk for `check_content`. Raises StoreError."""
        return read_update(
            path if self.shape.plain else EncodedUpdate(path, self.shape, self.decoding(steps)), self.shape
        )

    def check_content(self, update: Source, digest: bytes, content: UpdateContent) -> dict[str, float]:
        """Make the checks of `check_file` for a file that was read."""
        came, squares, wrong = content
        if came != digest:
            raise WrongDigest(digest, came)
        if wrong:
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_LAYOUT, f"{self.shape.payloads[0].encoding}: {wrong}")
        return self.check_values(update, squares)

    def check_values(self, update: Source, squares: Sequence[float]) -> dict[str, float]:
        """Make the checks of `check_file` for an update whose bytes are known to be the sent ones.

        squares: for each tensor the sum of the squares of its values, as of `digest_and_norms`. Raises UpdateRefused.
        """
        of_tensor, odd = iter(squares), set[str]()
        norms: dict[str, float] = {shape.payload: self._norm(shape, of_tensor, odd) for shape in self.shape.payloads}
        self._check_farthest(norms)
        if self.shape.trains:
            self._check_norm(norms["delta"])
        if self.shape.has_buffers:
            norms |= self._check_buffers(update, odd)
        self._check_others(norms)
        return norms

    def usual_norms(
        self, squares: Sequence[Sequence[float]], buffers: Sequence[BufferFacts] | None = None
    ) -> list[dict[str, float] | None]:
        """For each of several updates what `check_values` returns, if no rule speaks against it; None: it decides.

        squares: [updates][tensors]. buffers: the facts of each update, where updates have buffers. None: `check_values`
        decides then.
        """
        if self.shape.has_buffers and buffers is None:
            return [None] * len(squares)
        columns, rows = iter(np.asarray(squares, np.float64).T), range(len(squares))
        usual, lengths = np.ones(len(squares), bool), dict[str, list[float]]()
        for shape in self.shape.payloads:
            total = np.zeros(len(squares))
            for entry, square in zip(shape.layout.entries, columns, strict=False):
                if entry.trainable:
                    total += square  # one after the other, as `_norm` adds them
            norms = np.sqrt(total)
            usual &= norms <= self._most(shape.payload)
            usual &= np.isfinite(total)
            lengths[shape.payload] = norms.tolist()
        for row, facts in enumerate(buffers or ()):
            near, distance = self.buffers.usual(facts)
            usual[row] &= near
            if self._has_distance:
                lengths.setdefault(BUFFERS, []).append(distance)
        return [{name: of[row] for name, of in lengths.items()} if usual[row] else None for row in rows]

    @cached_property
    def _has_distance(self) -> bool:
        """Whether the buffers have a distance from those sent: integers have none."""
        sent = self.buffers.sent
        return any(entry.dtype.is_floating_point and entry.name in sent for entry in self.shape.entries)

    def _most(self, vector: str) -> float:
        """The largest norm of a payload that no rule refuses."""
        limits = [self.others[vector].limit] if vector in self.others else []
        if vector == DELTA:
            own = ROUNDED * self.clip_norm if self.clips_itself else 0.0
            limits += [self.max_norm, own, 0.0 if self.relative.clips else self.relative.limit]
        return min([self.farthest.get(vector, math.inf), *(limit for limit in limits if limit)])

    def _check_buffers(self, update: Source, odd: Collection[str]) -> dict[str, float]:
        try:
            distance = self.buffers.check(update, self.shape.layout_of("delta").entries, odd)
        except LayoutError as error:  # a byte that is no bool, which the reducer could not read
            raise UpdateRefused(RefusalReason.REFUSAL_REASON_LAYOUT, str(error)) from error
        return {} if distance is None else {BUFFERS: distance}

    def _check_others(self, norms: Mapping[str, float]) -> None:
        """Raises UpdateRefused if a payload other than the delta is too long."""
        for vector, relative in self.others.items():
            if relative.limit and norms.get(vector, 0.0) > relative.limit:
                raise UpdateRefused(
                    RefusalReason.REFUSAL_REASON_RELATIVE_NORM,
                    f"{vector}: expected a norm of {relative.limit:g} at most ({relative.times:g} times the largest "
                    f"median of a round, round.max_relative_payload), got {norms[vector]:g}",
                )

    def _check_farthest(self, norms: Mapping[str, float]) -> None:
        """Raises UpdateRefused if a payload is longer than any training makes it."""
        for vector, norm in norms.items():
            if norm > self.farthest.get(vector, math.inf):
                raise UpdateRefused(
                    RefusalReason.REFUSAL_REASON_NORM,
                    f"{vector}: expected a norm of {self.farthest[vector]:g} at most ({FARTHEST:g} times 1 + the norm "
                    f"of the model), got {norm:g}",
                )

    def _check_norm(self, norm: float) -> None:
        """Raises UpdateRefused if the delta is too long."""
        relative = self.relative
        if self.clips_itself and norm > ROUNDED * self.clip_norm:
            raise UpdateRefused(  # without the norm: nothing of a single client is told
                RefusalReason.REFUSAL_REASON_NORM,
                f"expected an update that its client has clipped to a norm of {self.clip_norm:g} (privacy.clip), got a"
                " longer one: is the client's software older?",
            )
        if self.max_norm and norm > self.max_norm:
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_NORM,
                f"expected an update of norm {self.max_norm:g} at most (round.max_update_norm), got {norm:g}",
            )
        if relative.limit and not relative.clips and norm > relative.limit:
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_RELATIVE_NORM,
                f"expected an update of norm {relative.limit:g} at most ({relative.times:g} times the largest median "
                f"of a round, or {FLOOR:g} of the model's norm if that is more; round.max_relative_norm), got {norm:g}",
            )

    def _norm(self, shape: PayloadShape, squares: Iterator[float], odd: set[str]) -> float:
        """Norm of a payload's trainable part. Raises UpdateRefused for a value that is not finite.

        odd: gets the names of the buffers with such a value; what may be in them depends on what was sent.
        """
        total = 0.0
        for entry, square in zip(shape.layout.entries, squares, strict=False):
            if not math.isfinite(square) and not entry.trainable:
                odd.add(entry.name)
            elif not math.isfinite(square):
                raise UpdateRefused(
                    RefusalReason.REFUSAL_REASON_NOT_FINITE,
                    f"{shape.payload}, tensor {entry.name!r}: expected finite values, got a NaN or an infinity",
                )
            total += square if entry.trainable else 0.0
        return math.sqrt(total)


@dataclass(frozen=True, slots=True)
class Collecting:
    """The exchange under way."""

    snapshot: Snapshot
    """The model that its clients were sent."""
    exchange: int
    state_epoch: int
    history: NormHistory
    max_bytes: int = 0
    """The most bytes of an update; 0: no limit but the exact size."""


def build_gate(engine: Engine, collecting: Collecting, client: str, registered: RegisteredData) -> AdmissionGate:
    """The gate for a client with this registered data."""
    section, round_, exchange = engine.config.round, collecting.snapshot.round + 1, collecting.exchange
    secure = engine.config.secure_aggregation is not None  # in a simulation, whose clients round what they clip
    local = local_in(engine.config, engine.algorithm, round_)
    shape, trains = engine.shapes[exchange], engine.algorithm.exchanges[exchange].trains
    ordered = ExpectedWork(registered.examples, local, trains, registered.own_batches, engine.own_loop)
    steps = ordered.steps(max(1, registered.examples))
    # The other payloads are as long as gradients: K_i steps with one move a model as far as a delta.
    model_norm, rate = collecting.snapshot.norm, learning_rate_in(engine.config, round_)
    others = collecting.history.others(section, FLOOR * model_norm / (rate * steps) if rate else 0.0)
    # A batch that the task makes may have any number of the examples.
    largest_batch = registered.examples if registered.own_batches else local.batch_size
    buffers = BufferRules(
        collecting.snapshot.buffers,
        bounded=bool(section.max_relative_payload),
        limit=others.get(BUFFERS, NO_LIMIT),
        most=min(most_counted(steps, registered.examples, largest_batch), 1 << 53),
    )
    return AdmissionGate(
        shape,
        collecting.max_bytes or shape.size_bytes,
        section.max_update_norm,
        0.0 if secure else collecting.snapshot.clip or section.clip_update_norm,
        collecting.state_epoch,
        collecting.history.limit(section, model_norm),
        {vector: limit for vector, limit in others.items() if vector != BUFFERS},
        {
            payload.payload: FARTHEST * (1.0 + model_norm)
            for payload in shape.payloads
            if (section.max_relative_norm if payload.payload == DELTA else section.max_relative_payload)
        },
        ordered,
        buffers,
        engine.config.record_privacy,
        engine.config.client_privacy is not None and not secure,
        lambda steps: engine.decoding(collecting.snapshot.round + 1, exchange, client, steps),
    )
