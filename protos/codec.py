"""Packs tensors into bytes and unpacks them. Only this module and layout.py depend on dtypes and byte order.

A bundle is one little-endian buffer. Each tensor is contiguous, in C order, and starts at the first multiple of its
element size after the previous tensor. Bytes between tensors are zero. Sizes and offsets are in bytes.

The module also exports the names of layouts, chunks and digests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from protos.buffers import zeros
from protos.chunks import Buffer
from protos.digests import digest_bytes, digest_message, digest_of, digest_text
from protos.layout import Entry, Layout, LayoutError

__all__ = [
    "Buffer",
    "Entry",
    "Layout",
    "LayoutError",
    "check_tensors",
    "digest_bytes",
    "digest_message",
    "digest_of",
    "digest_text",
    "pack",
    "pieces_of",
    "unpack",
    "views",
]


def pack(tensors: Mapping[str, Tensor], layout: Layout) -> memoryview:
    """Write tensors into a new buffer of `layout.size_bytes` bytes. They may have any device and strides.

    Raises:
        LayoutError: the tensors do not match the layout. Their order does not matter.
    """
    check_tensors(tensors, layout)
    buffer = zeros(layout.size_bytes)
    for name, target in unpack(buffer, layout).items():
        target.copy_(tensors[name].detach())
    return buffer


def pieces_of(tensors: Mapping[str, Tensor], layout: Layout) -> Iterator[memoryview]:
    """The bytes that `pack` writes, in successive pieces. The bytes of a contiguous CPU tensor are not copied.

    Such a piece shares the tensor's memory and keeps it alive. Raises LayoutError as `pack` does.
    """
    check_tensors(tensors, layout)
    end = 0
    for entry in layout.entries:
        if entry.offset > end:
            yield memoryview(bytes(entry.offset - end))
        if entry.nbytes:
            flat = tensors[entry.name].detach().cpu().contiguous().view(-1)
            yield flat.view(torch.uint8).numpy().data
        end = entry.end


def unpack(buffer: Buffer, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a bundle as CPU views of `buffer`, without a copy. The views keep the buffer alive.

    Do not write into views of a read-only buffer.

    Raises:
        LayoutError: the buffer does not have the layout's size, or a bool tensor has a byte other than 0 and 1.
    """
    size = memoryview(buffer).nbytes
    if size != layout.size_bytes:
        raise LayoutError(f"expected a buffer of {layout.size_bytes} bytes, got {size}")
    return views(torch.from_numpy(np.asarray(_AnyBuffer(buffer))), layout)


def views(whole: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a bundle as views of its bytes, [size], on their device. Raises LayoutError as `unpack`."""
    _require_little_endian()
    return {entry.name: _view(whole, entry) for entry in layout.entries}


class _AnyBuffer:
    """Presents a buffer to numpy as writable, and keeps it alive.

    torch has no read-only tensors and would warn about a read-only array.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.memory = np.frombuffer(buffer, np.uint8)
        address = self.memory.ctypes.data
        self.__array_interface__ = {
            "data": (address, False),
            "shape": self.memory.shape,
            "typestr": "|u1",
            "version": 3,
        }


def check_tensors(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Raises LayoutError unless the tensors, in any order, match the layout. Their values are not read."""
    _require_little_endian()
    if len(tensors) == len(layout.entries) and all(_fits(tensors.get(entry.name), entry) for entry in layout.entries):
        return
    in_order = {entry.name: tensors[entry.name] for entry in layout.entries if entry.name in tensors} | dict(tensors)
    trainable = [entry.name for entry in layout.entries if entry.trainable and entry.name in tensors]
    if difference := layout.difference(Layout.of(in_order, trainable)):
        raise LayoutError(difference)


def _fits(tensor: Tensor | None, entry: Entry) -> bool:
    return tensor is not None and tensor.dtype == entry.dtype and tensor.shape == entry.shape


def _view(whole: Tensor, entry: Entry) -> Tensor:
    raw = whole[entry.offset : entry.end]
    if entry.dtype == torch.bool and entry.nbytes and int(raw.max()) > 1:
        raise LayoutError(f"tensor {entry.name!r}: expected bytes 0 and 1 for bool, got {int(raw.max())}")
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype, device=whole.device)
    return raw.view(entry.dtype).view(entry.shape)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise RuntimeError(
            "expected a little-endian machine: the wire is little-endian and values are not swapped here"
        )
