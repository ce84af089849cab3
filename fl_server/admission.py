"""The gate before an update can touch a sum: header, layout, size, digest, finiteness, norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import blake3

from fl_server.file_look import look_through
from fl_server.norms import BUFFERS, NO_LIMIT, RelativeNorm
from fl_server.runs.buffers import BadBuffer, BufferRules
from fl_server.runs.ordered import Ordered
from fl_server.shapes import PayloadShape, UpdateShape
from fl_server.store.files import disk_errors
from protos.codec import Layout, LayoutError, digest_bytes, digest_text
from protos.fl.v1.training_pb2 import PayloadKind, RefusalReason, UpdateHeader

_READ_BYTES = 1 << 20
_TIMES_TENSORS = 10
"""So many times the model's tensors in a manifest are refused without being read one by one."""
_MAX_EXAMPLES = 2**53
"""What float64, in which weights are computed, still counts one by one."""


class Refused(Exception):
    """The update will never count. `reason` is the wire's, the text says what was expected and what came."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class WrongDigest(Refused):
    """The bytes have not the digest that was announced: once, it may be the disk's or the network's fault."""

    def __init__(self, expected: bytes, came: bytes) -> None:
        super().__init__(
            RefusalReason.REFUSAL_REASON_DIGEST,
            f"expected bytes with the digest {digest_text(expected)}, got {digest_text(came)}",
        )


@dataclass(frozen=True, slots=True)
class Gate:
    """What an update of a round must be."""

    shape: UpdateShape
    max_bytes: int
    max_norm: float
    """Largest L2 norm of a delta's trainable part; 0: any finite one."""
    clip_norm: float
    """Norm to which a longer delta is scaled down; 0: none is scaled."""
    state_epoch: int
    relative: RelativeNorm = NO_LIMIT
    """Beside earlier updates; another reason to refuse a longer delta, or to scale it down."""
    others: Mapping[str, RelativeNorm] = field(default_factory=dict)
    """Of each other vector, by the name of its payload or "buffers", beside earlier ones; a longer one is refused."""
    ordered: Ordered | None = None
    """What the client was told to do; None: its header is not held to it."""
    buffers: BufferRules = field(default_factory=BufferRules)

    def check_header(self, header: UpdateHeader) -> None:
        """All that can be refused before a byte of tensors is sent. Raises Refused."""
        if not 1 <= header.num_examples <= _MAX_EXAMPLES or header.num_steps < 1:
            raise Refused(
                RefusalReason.REFUSAL_REASON_HEADER,
                f"expected 1 to {_MAX_EXAMPLES} examples and at least one step, got {header.num_examples} and "
                f"{header.num_steps}",
            )
        if self.ordered is not None and (difference := self.ordered.difference(header)):
            raise Refused(RefusalReason.REFUSAL_REASON_HEADER, difference)
        if header.state_epoch != self.state_epoch:
            raise Refused(
                RefusalReason.REFUSAL_REASON_STATE_EPOCH,
                f"expected client state of epoch {self.state_epoch}, got {header.state_epoch}: it restarts from zero",
            )
        self._check_payloads(header)
        if header.size_bytes != self.shape.size_bytes or header.size_bytes > self.max_bytes:
            raise Refused(
                RefusalReason.REFUSAL_REASON_SIZE,
                f"expected {self.shape.size_bytes} bytes (limit {self.max_bytes}), got {header.size_bytes}",
            )
        try:
            digest_bytes(header.digest)
        except ValueError as error:
            raise Refused(RefusalReason.REFUSAL_REASON_DIGEST, str(error)) from error

    def _check_payloads(self, header: UpdateHeader) -> None:
        kinds, expected = [payload.kind for payload in header.payloads], [each.kind for each in self.shape.payloads]
        if kinds != expected:
            raise Refused(
                RefusalReason.REFUSAL_REASON_LAYOUT,
                f"expected the payloads {_kind_names(expected)}, got {_kind_names(kinds) or 'nothing'}",
            )
        for payload, shape in zip(header.payloads, self.shape.payloads, strict=True):
            if payload.manifest == shape.manifest and shape.layout.size_bytes <= self.max_bytes:
                continue  # as expected, word for word; what follows finds the words for any other
            if (count := len(payload.manifest.tensors)) > _TIMES_TENSORS * len(shape.layout.entries):
                raise Refused(
                    RefusalReason.REFUSAL_REASON_LAYOUT,
                    f"{shape.payload}: expected {len(shape.layout.entries)} tensors, got {count}",
                )
            try:
                came = Layout.from_manifest(payload.manifest, self.max_bytes)
            except LayoutError as error:
                raise Refused(RefusalReason.REFUSAL_REASON_LAYOUT, str(error)) from error
            if difference := shape.layout.difference(came):
                raise Refused(RefusalReason.REFUSAL_REASON_LAYOUT, f"{shape.payload}: {difference}")

    def clip_factor(self, norm: float) -> float:
        """By what a delta of this norm is multiplied before it counts."""
        clips = self.relative.clips and self.shape.trains
        limits = [limit for limit in (self.clip_norm, self.relative.limit if clips else 0.0) if limit]
        return min(1.0, min(limits) / norm) if limits and norm else 1.0

    def check_file(self, path: Path, digest: bytes) -> dict[str, float]:
        """Check a whole update on disk; returns the L2 norms of its vectors, the first payload's first.

        Of a payload its trainable part is meant; "buffers" is how far those lie from the ones that were sent. Norms see
        every value, so a file is searched for NaN by them. Raises WrongDigest, Refused.
        """
        came, squares = look_through(path, self.shape.entries)
        if came != digest:
            raise WrongDigest(digest, came)
        of_tensor = iter(squares)
        norms: dict[str, float] = {shape.payload: self._norm(shape, of_tensor) for shape in self.shape.payloads}
        if self.shape.trains:
            self._check_norm(norms["delta"])
            norms |= self._check_buffers(path)
        self._check_others(norms)
        return norms

    def _check_buffers(self, path: Path) -> dict[str, float]:
        try:
            distance = self.buffers.check(path, self.shape.layout_of("delta").entries)
        except BadBuffer as error:
            raise Refused(RefusalReason.REFUSAL_REASON_NORM, str(error)) from error
        return {} if distance is None else {BUFFERS: distance}

    def _check_others(self, norms: Mapping[str, float]) -> None:
        """Raises Refused for another payload than the delta that is too long."""
        for vector, relative in self.others.items():
            if relative.limit and norms.get(vector, 0.0) > relative.limit:
                raise Refused(
                    RefusalReason.REFUSAL_REASON_NORM,
                    f"{vector}: expected a norm of {relative.limit:g} at most ({relative.times:g} times the median of "
                    f"those that counted, round.max_relative_payload), got {norms[vector]:g}",
                )

    def _check_norm(self, norm: float) -> None:
        """Raises Refused for a delta that is too long."""
        relative = self.relative
        beside = f" ({relative.times:g} times the median of those that counted)"
        for limit, why in ((self.max_norm, ""), (0.0 if relative.clips else relative.limit, beside)):
            if limit and norm > limit:
                raise Refused(
                    RefusalReason.REFUSAL_REASON_NORM,
                    f"expected an update of norm {limit:g} at most{why}, got {norm:g}",
                )

    def _norm(self, shape: PayloadShape, squares: Iterator[float]) -> float:
        """Of a payload's trainable part. Raises Refused for a value that is not finite, also in a buffer."""
        total = 0.0
        for entry, square in zip(shape.layout.entries, squares, strict=False):
            if not math.isfinite(square):
                raise Refused(
                    RefusalReason.REFUSAL_REASON_NOT_FINITE,
                    f"{shape.payload}, tensor {entry.name!r}: expected finite values, got a NaN or an infinity",
                )
            total += square if entry.trainable else 0.0
        return math.sqrt(total)


def file_digest(path: Path) -> bytes:
    """BLAKE3-256 of a file, read in pieces."""
    hasher = blake3.blake3()
    with disk_errors(f"read {path}"), path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            hasher.update(piece)
    return hasher.digest()


def _kind_names(kinds: Iterable[int]) -> str:
    known = PayloadKind.values()
    names = [PayloadKind.Name(kind) if kind in known else str(kind) for kind in kinds]
    return ", ".join(name.removeprefix("PAYLOAD_KIND_") for name in names)
