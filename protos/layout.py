"""Layouts: the places of a bundle's tensors in its bytes, and their form on the wire, manifests."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protos.digests import digest_of
from protos.fl.v1 import tensor_pb2
from protos.wire import filled

_DTYPES: dict[tensor_pb2.DType, torch.dtype] = {
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
    tensor_pb2.DTYPE_FLOAT64: torch.float64,
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DTYPE_INT64: torch.int64,
    tensor_pb2.DTYPE_INT32: torch.int32,
    tensor_pb2.DTYPE_INT16: torch.int16,
    tensor_pb2.DTYPE_INT8: torch.int8,
    tensor_pb2.DTYPE_UINT8: torch.uint8,
    tensor_pb2.DTYPE_BOOL: torch.bool,
}
_WIRE_DTYPES = {dtype: number for number, dtype in _DTYPES.items()}

_MAX_TENSORS = 100_000
_MAX_NAME_CHARS = 512
_MAX_DIMENSIONS = 64  # what torch itself can hold
_MAX_ADDRESSABLE = 2**63 - 1  # torch counts elements and strides in int64


class LayoutError(ValueError):
    """Tensors, a manifest or a buffer do not match. The message has what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in a bundle. offset: bytes from the start; trainable: changed by training and server steps."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements: the product of the shape, 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor."""
        return self.offset + self.nbytes

    def __str__(self) -> str:
        return f"{self.shape} {_dtype_name(self.dtype)}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a bundle: entries in order of offset, and the bytes of the whole."""

    entries: tuple[Entry, ...]
    size_bytes: int

    @staticmethod
    def of(tensors: Mapping[str, Tensor], trainable: Collection[str] = ()) -> Layout:
        """The layout of named tensors, in the order given.

        Raises:
            LayoutError: a dtype is not supported, a name is too long, there are too many tensors, or a trainable name
                is not among them. What this makes, `from_manifest` reads.
        """
        _check_count(len(tensors))
        moved = set(trainable)
        if missing := sorted(moved - tensors.keys()):
            raise LayoutError(f"expected every trainable name among the tensors, got the unknown name {missing[0]!r}")
        entries: list[Entry] = []
        end = 0
        for name, tensor in tensors.items():
            _check_name(name)
            if tensor.dtype not in _WIRE_DTYPES:
                raise LayoutError(f"tensor {name!r}: expected a dtype of {_known_dtypes()}, got {tensor.dtype}")
            offset = _align(end, tensor.dtype.itemsize)
            entries.append(Entry(name, tensor.dtype, tuple(tensor.shape), offset, name in moved))
            end = offset + tensor.numel() * tensor.dtype.itemsize
        return Layout(tuple(entries), end)

    def to_manifest(self) -> tensor_pb2.Manifest:
        """The layout as a message, with plain encoding."""
        specs = [filled(tensor_pb2.TensorSpec, entry, dtype=_WIRE_DTYPES[entry.dtype]) for entry in self.entries]
        return tensor_pb2.Manifest(tensors=specs, size_bytes=self.size_bytes, encoding=tensor_pb2.ENCODING_PLAIN)

    @staticmethod
    def from_manifest(manifest: tensor_pb2.Manifest, max_bytes: int) -> Layout:
        """Read an untrusted manifest. No memory is allocated for its tensors.

        Args:
            manifest: as received.
            max_bytes: the largest accepted bundle.

        Raises:
            LayoutError: a field that `Layout.to_manifest` would not write, or a bundle over `max_bytes`.
        """
        _check_manifest(manifest, max_bytes)
        entries: list[Entry] = []
        names: set[str] = set()
        end = 0
        for spec in manifest.tensors:
            entry = _entry_of(spec, end)
            if entry.name in names:
                raise LayoutError(f"tensor {entry.name!r}: expected every name once, got it twice")
            if entry.end > max_bytes:
                raise LayoutError(f"tensor {entry.name!r}: expected an end within {max_bytes} bytes, got {entry.end}")
            names.add(entry.name)
            entries.append(entry)
            end = entry.end
        if manifest.size_bytes != end:
            raise LayoutError(f"expected size_bytes {end} (the last tensor's end), got {manifest.size_bytes}")
        return Layout(tuple(entries), end)

    def digest(self, buffer: bytes | bytearray | memoryview) -> bytes:
        """The bundle's name: BLAKE3-256 of its table of contents, followed by its bytes.

        With the bytes alone, two models of zeros would have one name. The table has a line for each tensor with the
        name's length in UTF-8 bytes, name, dtype, shape and trainable flag, as in "6:weight float32 3,4 1".
        """
        return digest_of(self.table, buffer)

    @property
    def table(self) -> bytes:
        """The table of contents, with which the digest begins."""
        lines = (
            f"{len(entry.name.encode())}:{entry.name} {_dtype_name(entry.dtype)} "
            f"{','.join(map(str, entry.shape))} {int(entry.trainable)}\n"
            for entry in self.entries
        )
        return "".join(lines).encode()

    def difference(self, other: Layout) -> str | None:
        """Description of the first difference of `other` from this layout; None if they are equal."""
        mine = {entry.name: entry for entry in self.entries}
        theirs = {entry.name: entry for entry in other.entries}
        for name, entry in mine.items():
            if name not in theirs:
                return f"tensor {name!r}: expected shape {entry}, but it is missing"
        for name, entry in theirs.items():
            if name not in mine:
                return f"tensor {name!r}: not expected, got shape {entry}"
        for position, (expected, came) in enumerate(zip(self.entries, other.entries, strict=True)):
            if expected.name != came.name:
                return f"order: expected tensor {expected.name!r} at position {position}, got {came.name!r}"
            if (expected.shape, expected.dtype) != (came.shape, came.dtype):
                return f"tensor {expected.name!r}: expected shape {expected}, got {came}"
            if expected.trainable != came.trainable:
                return f"tensor {expected.name!r}: expected trainable = {expected.trainable}, got {came.trainable}"
        return None


def _check_manifest(manifest: tensor_pb2.Manifest, max_bytes: int) -> None:
    if manifest.encoding != tensor_pb2.ENCODING_PLAIN:
        raise LayoutError(f"expected encoding PLAIN ({tensor_pb2.ENCODING_PLAIN}), got number {manifest.encoding}")
    if manifest.size_bytes > max_bytes:
        raise LayoutError(f"expected at most {max_bytes} bytes, got size_bytes {manifest.size_bytes}")
    _check_count(len(manifest.tensors))


def _check_count(count: int) -> None:
    if count > _MAX_TENSORS:
        raise LayoutError(f"expected at most {_MAX_TENSORS} tensors, got {count}")


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= _MAX_NAME_CHARS:
        shown = f" ({name[:40]}...)" if name else ""
        raise LayoutError(f"expected a name of 1 to {_MAX_NAME_CHARS} characters, got {len(name)}{shown}")


def _entry_of(spec: tensor_pb2.TensorSpec, end: int) -> Entry:
    """The entry of a spec, checked. end: the end of the previous tensor."""
    _check_name(spec.name)
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise LayoutError(f"tensor {spec.name!r}: expected a dtype of {_known_dtypes()}, got number {spec.dtype}")
    _check_shape(spec, dtype)
    if spec.offset != (expected := _align(end, dtype.itemsize)):
        raise LayoutError(
            f"tensor {spec.name!r}: expected offset {expected} (aligned, after the previous tensor), got {spec.offset}"
        )
    return Entry(spec.name, dtype, tuple(spec.shape), spec.offset, spec.trainable)


def _check_shape(spec: tensor_pb2.TensorSpec, dtype: torch.dtype) -> None:
    if len(spec.shape) > _MAX_DIMENSIONS:
        raise LayoutError(f"tensor {spec.name!r}: expected at most {_MAX_DIMENSIONS} dimensions, got {len(spec.shape)}")
    if any(size < 0 for size in spec.shape):
        raise LayoutError(f"tensor {spec.name!r}: expected sizes of 0 and more, got shape {tuple(spec.shape)}")
    # Zeros count as one: torch computes strides from the other sizes, even without elements.
    if math.prod(max(size, 1) for size in spec.shape) * dtype.itemsize > _MAX_ADDRESSABLE:
        raise LayoutError(
            f"tensor {spec.name!r}: expected a size that a machine can hold, got shape {tuple(spec.shape)}"
        )


def _align(offset: int, itemsize: int) -> int:
    """The first multiple of `itemsize` at or after `offset`."""
    return -(-offset // itemsize) * itemsize


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _known_dtypes() -> str:
    return ", ".join(_dtype_name(dtype) for dtype in _WIRE_DTYPES)
