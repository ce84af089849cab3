"""Tensors that lie in memory as they go over the wire: what is kept and what is sent out is one memory, not two."""

from __future__ import annotations

import math

import torch

import algorithms as fl
from protos.codec import Buffer, Layout, pack, unpack
from protos.memory import zeros


def blank(layout: Layout) -> fl.Tensors:
    """Tensors of a layout, all zero, as views on one new buffer of `layout.size_bytes` bytes."""
    return unpack(zeros(layout.size_bytes), layout)


def laid_out(tensors: fl.Tensors, layout: Layout) -> fl.Tensors:
    """Copies of the tensors as views on one new buffer. Raises LayoutError if they are not those of the layout."""
    return unpack(pack(tensors, layout), layout)


def packed(tensors: fl.Tensors, layout: Layout) -> Buffer:
    """The tensors as the bytes of a bundle: their own memory where they lie so already, else a copy.

    Read only: whoever has the tensors must not write into them either while these bytes are in use. Raises LayoutError
    if they are not the tensors of the layout.
    """
    memory = _memory_of(tensors, layout)
    return memory if memory is not None and _gaps_are_zero(memory, layout) else pack(tensors, layout)


def _memory_of(tensors: fl.Tensors, layout: Layout) -> memoryview | None:
    """The one memory that holds the tensors, at the layout's places, and nothing besides; None if there is none."""
    filled = [entry for entry in layout.entries if entry.nbytes]
    if not filled or tensors.keys() != {entry.name for entry in layout.entries}:
        return None
    storage = tensors[filled[0].name].untyped_storage()
    if storage.nbytes() != layout.size_bytes or storage.device.type != "cpu":
        return None
    for entry in layout.entries:
        tensor = tensors[entry.name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            return None
        if entry.nbytes and (tensor.data_ptr() != storage.data_ptr() + entry.offset or not tensor.is_contiguous()):
            return None
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data.toreadonly()


def _gaps_are_zero(memory: memoryview, layout: Layout) -> bool:
    """Whether the bytes between two tensors are what a bundle has there."""
    ends = [0, *(entry.end for entry in layout.entries)]
    return not any(any(memory[end : entry.offset]) for end, entry in zip(ends, layout.entries, strict=False))


def groups(layout: Layout, group_bytes: int) -> list[list[str]]:
    """The names of a layout's tensors in order, cut into groups of about so many bytes; a larger tensor is alone."""
    found: list[list[str]] = []
    room = -math.inf
    for entry in layout.entries:
        if entry.nbytes > room:
            found.append([])
            room = group_bytes
        found[-1].append(entry.name)
        room -= entry.nbytes
    return found
