"""Tensors in memory in their wire layout, so that the model kept and the bundle sent are the same memory."""

from __future__ import annotations

import math

import torch

import algorithms as fl
from algorithms.precision import master_dtype
from protos.buffers import zeros
from protos.codec import Buffer, Layout, check_tensors, pack, unpack, views

CPU = torch.device("cpu")


def blank(layout: Layout, device: torch.device = CPU) -> fl.Tensors:
    """Tensors of a layout, all zero, as views on one new buffer of `layout.size_bytes` bytes."""
    if device.type == "cpu":
        return unpack(zeros(layout.size_bytes), layout)
    return views(torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device), layout)


def master_layout(layout: Layout) -> Layout:
    """The layout of a server's state for parameters of this layout: float32 in place of a lower precision."""
    if all(entry.dtype == master_dtype(entry.dtype) for entry in layout.entries):
        return layout
    entries = {
        entry.name: torch.empty(entry.shape, dtype=master_dtype(entry.dtype), device="meta") for entry in layout.entries
    }
    return Layout.of(entries, trainable=[entry.name for entry in layout.entries if entry.trainable])


def laid_out(tensors: fl.Tensors, layout: Layout, device: torch.device = CPU) -> fl.Tensors:
    """Copies of the tensors as views on one new buffer. Raises LayoutError if they are not those of the layout."""
    check_tensors(tensors, layout)
    made = blank(layout, device)
    for name, tensor in made.items():
        tensor.copy_(tensors[name].detach())
    return made


def packed(tensors: fl.Tensors, layout: Layout) -> Buffer:
    """The tensors as the bytes of a bundle: their own memory if it has the layout, otherwise a copy.

    The bytes are read-only, and the tensors must not change while the bytes are in use. Raises LayoutError
    if they are not the tensors of the layout.
    """
    memory = _memory_of(tensors, layout)
    return memory if memory is not None and _gaps_are_zero(memory, layout) else pack(tensors, layout)


def _memory_of(tensors: fl.Tensors, layout: Layout) -> memoryview | None:
    """The memory that holds exactly these tensors, at the layout's offsets; None if there is none."""
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
    """Whether the bytes between tensors are zero, as in a bundle."""
    ends = [0, *(entry.end for entry in layout.entries)]
    return not any(any(memory[end : entry.offset]) for end, entry in zip(ends, layout.entries, strict=False))


def groups(layout: Layout, group_bytes: int) -> list[list[str]]:
    """The names of a layout's tensors in order, in groups of about `group_bytes`; a larger tensor is alone."""
    made: list[list[str]] = []
    room = -math.inf
    for entry in layout.entries:
        if entry.nbytes > room:
            made.append([])
            room = group_bytes
        made[-1].append(entry.name)
        room -= entry.nbytes
    return made
