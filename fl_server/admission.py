"""The gate before an update can touch a sum: header, layout, size, digest, finiteness, norm."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import blake3
import torch

from protos.codec import Entry, Layout, LayoutError, digest_bytes, digest_text, unpack
from protos.fl.v1.training_pb2 import PAYLOAD_KIND_DELTA, PayloadKind, RefusalReason, UpdateHeader

_READ_BYTES = 1 << 20
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

    layout: Layout
    """Trainable tensors: the delta. Buffers: their final values."""
    max_bytes: int
    max_norm: float
    """Largest L2 norm of the trainable part; 0: any finite one."""
    state_epoch: int

    def check_header(self, header: UpdateHeader) -> None:
        """All that can be refused before a byte of tensors is sent. Raises Refused."""
        if not 1 <= header.num_examples <= _MAX_EXAMPLES or header.num_steps < 1:
            raise Refused(
                RefusalReason.REFUSAL_REASON_HEADER,
                f"expected 1 to {_MAX_EXAMPLES} examples and at least one step, got {header.num_examples} and "
                f"{header.num_steps}",
            )
        if header.state_epoch != self.state_epoch:
            raise Refused(
                RefusalReason.REFUSAL_REASON_STATE_EPOCH,
                f"expected client state of epoch {self.state_epoch}, got {header.state_epoch}: it restarts from zero",
            )
        self._check_payload(header)
        if header.size_bytes != self.layout.size_bytes or header.size_bytes > self.max_bytes:
            raise Refused(
                RefusalReason.REFUSAL_REASON_SIZE,
                f"expected {self.layout.size_bytes} bytes (limit {self.max_bytes}), got {header.size_bytes}",
            )
        try:
            digest_bytes(header.digest)
        except ValueError as error:
            raise Refused(RefusalReason.REFUSAL_REASON_DIGEST, str(error)) from error

    def _check_payload(self, header: UpdateHeader) -> None:
        kinds = [payload.kind for payload in header.payloads]
        if kinds != [PAYLOAD_KIND_DELTA]:
            came = ", ".join(_kind_name(kind) for kind in kinds) or "nothing"
            raise Refused(RefusalReason.REFUSAL_REASON_LAYOUT, f"expected the payload DELTA alone, got {came}")
        try:
            came_layout = Layout.from_manifest(header.payloads[0].manifest, self.max_bytes)
        except LayoutError as error:
            raise Refused(RefusalReason.REFUSAL_REASON_LAYOUT, str(error)) from error
        difference = self.layout.difference(came_layout)
        if difference is not None:
            raise Refused(RefusalReason.REFUSAL_REASON_LAYOUT, difference)

    def check_file(self, path: Path, digest: bytes) -> float:
        """Check a whole update on disk; returns the L2 norm of its trainable part. Raises WrongDigest, Refused.

        The norm sees every trainable value, so a file is searched for NaN by it; buffers are searched one by one.
        """
        came = file_digest(path)
        if came != digest:
            raise WrongDigest(digest, came)
        squares = 0.0
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for entry in self.layout.entries:
                if entry.dtype.is_floating_point:
                    total = sum(_squares(descriptor, entry))
                    if not math.isfinite(total):
                        raise Refused(
                            RefusalReason.REFUSAL_REASON_NOT_FINITE,
                            f"tensor {entry.name!r}: expected finite values, got a NaN or an infinity",
                        )
                    squares += total if entry.trainable else 0.0
        finally:
            os.close(descriptor)
        norm = math.sqrt(squares)
        if self.max_norm and norm > self.max_norm:
            raise Refused(
                RefusalReason.REFUSAL_REASON_NORM, f"expected an update of norm {self.max_norm:g} at most, got {norm:g}"
            )
        return norm


def file_digest(path: Path) -> bytes:
    """BLAKE3-256 of a file, read in pieces."""
    hasher = blake3.blake3()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            hasher.update(piece)
    return hasher.digest()


def _squares(descriptor: int, entry: Entry) -> list[float]:
    """Sums of squares of a tensor in a file, block by block, in float64: no float32 value overflows them."""
    per_block = _READ_BYTES // entry.dtype.itemsize
    sums = []
    for start in range(0, entry.numel, per_block):
        count = min(per_block, entry.numel - start)
        raw = os.pread(descriptor, count * entry.dtype.itemsize, entry.offset + start * entry.dtype.itemsize)
        block = Entry(entry.name, entry.dtype, (count,), 0, entry.trainable)
        values = unpack(raw, Layout((block,), block.nbytes))[entry.name].double()
        sums.append(float(torch.dot(values, values)))
    return sums


def _kind_name(kind: int) -> str:
    return PayloadKind.Name(kind) if kind in PayloadKind.values() else str(kind)
