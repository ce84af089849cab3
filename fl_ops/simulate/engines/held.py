"""Updates that stay in the memory of the device that trained them, so that they are neither written nor read.

An update is one row of bytes with the layout of a file, so that all of the server's code can read it. The sums of the
squares of its tensors, which admission needs, are computed for many updates together. They are added in pairs, each
value by itself, so that the number of updates changes no bit of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from fl_client.training.payloads import PlacedPayload
from fl_ops.simulate.run_files import MEMORY_SHARE, free_memory
from protos.codec import Entry

NO_DIGEST = bytes(32)
"""In place of the digest of bytes that are never sent."""
_WIDE_BYTES = 64 << 20
"""Memory for the widened values of a tensor, of as many updates as fit."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HeldInMemory:
    """One client's update; see `fl_server.aggregation.updates.HeldUpdate`."""

    data: Tensor
    """The bytes of the update, [size]."""
    squares: tuple[float, ...]
    """For each tensor the sum of the squares of its values in float64; 0 for integers and bools."""

    @property
    def finite(self) -> bool:
        """Whether all sums of squares are finite. Then all values are."""
        return all(math.isfinite(square) for square in self.squares)

    @property
    def device(self) -> torch.device:
        """The device that holds the update."""
        return self.data.device

    def read(self, entry: Entry, start: int, count: int) -> Tensor:
        """See `HeldUpdate.read`."""
        return _values(self.data, entry, start, count)


class DeviceMemory:
    """The memory for updates on a device: a share of what was free there when the run began."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        """limit: bytes. None: MEMORY_SHARE of the free memory."""
        self._device = device
        self._limit = int(MEMORY_SHARE * _free_bytes(device)) if limit is None else limit
        self._held: WeakSet[HeldInMemory] = WeakSet()

    def hold(self, updates: Sequence[Sequence[PlacedPayload]]) -> list[HeldInMemory] | None:
        """Copy the updates of a group of clients. None if they do not fit beside those that are in use.

        Updates have one layout. Nobody has to release them: they count until the last reference is gone.
        """
        size = sum(part.layout.size_bytes for part in updates[0])
        if size * len(updates) + sum(each.data.nbytes for each in self._held) > self._limit:
            return None
        try:
            rows = [_packed(parts, self._device) for parts in updates]
            squares = sums_of_squares(rows, updates[0])
        except (MemoryError, torch.OutOfMemoryError):
            return None
        held = [HeldInMemory(*each) for each in zip(rows, squares, strict=True)]
        self._held.update(held)
        return held


def sums_of_squares(rows: Sequence[Tensor], parts: Sequence[PlacedPayload]) -> list[tuple[float, ...]]:
    """For each update, and each of its tensors by rising offset, the sum of the squares of its values in float64.

    rows: the updates' bytes. parts: of one of them, for the layout.
    """
    columns: list[Tensor] = []
    for entry in _placed(parts):
        if entry.dtype.is_floating_point:
            together = max(1, _WIDE_BYTES // (8 * max(entry.numel, 1)))
            cuts = range(0, len(rows), together)
            columns.append(torch.cat([_squares(rows[cut : cut + together], entry) for cut in cuts]))
        else:
            columns.append(torch.zeros(len(rows), dtype=torch.float64, device=rows[0].device))
    # One transfer for all, because each waits for the device.
    return [tuple(row) for row in torch.stack(columns, dim=1).tolist()]


def _squares(rows: Sequence[Tensor], entry: Entry) -> Tensor:
    """The sums of the squares of one tensor, [updates]."""
    wide = torch.stack([_values(row, entry, 0, entry.numel) for row in rows]).double()
    wide.mul_(wide)
    width = entry.numel
    while width > 1:
        half = width // 2
        wide[:, :half].add_(wide[:, width - half : width])
        width -= half
    return wide[:, :1].sum(dim=1)  # 0 of an empty tensor


def _values(row: Tensor, entry: Entry, start: int, count: int) -> Tensor:
    size = entry.dtype.itemsize
    first = entry.offset + start * size
    part = row[first : first + count * size]
    if first % size:  # a payload begins where the one before it ends, which may be an odd byte
        part = part.clone()
    return part.view(entry.dtype)


def _placed(parts: Sequence[PlacedPayload]) -> Iterator[Entry]:
    """All tensors, with offsets from the start of the update."""
    base = 0
    for part in parts:
        for entry in part.layout.entries:
            yield Entry(entry.name, entry.dtype, entry.shape, base + entry.offset, entry.trainable)
        base += part.layout.size_bytes


def _packed(parts: Sequence[PlacedPayload], device: torch.device) -> Tensor:
    """The bytes of an update, as a file has them."""
    pieces: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device=device)]
    for part in parts:
        end = 0
        for entry in part.layout.entries:
            pieces.append(torch.zeros(entry.offset - end, dtype=torch.uint8, device=device))
            pieces.append(part.tensors[entry.name].detach().to(device).contiguous().flatten().view(torch.uint8))
            end = entry.end
    return torch.cat(pieces)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
