"""Updates that stay in the memory of the device that trained them, so that they are neither written nor read.

An update is one row of bytes with the layout of a file, so that all of the server's code can read it. The sums of the
squares of its tensors, which admission needs, are computed for many updates together. They are added in pairs, each
value by itself, so that the number of updates changes no bit of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakSet

import torch
from torch import Tensor

from algorithms import tree
from algorithms.aggregate import squares_of_rows
from fl_client.training.payloads import PlacedPayload
from fl_ops.simulate.run_files import MEMORY_SHARE, free_memory
from protos.codec import Entry
from protos.fl.v1.training_pb2 import UpdateHeader

NO_DIGEST = bytes(32)
"""Takes the place of the digest of bytes that are never sent."""
_ALIGNED = 16
"""Bytes: a multiple of each dtype's."""
_WIDE_BYTES = 64 << 20
"""Memory for the widened values of a tensor, of as many updates as fit."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldInMemory:
    """One client's update; see `fl_server.aggregation.updates.HeldUpdate`."""

    group: Rows
    """The updates of which it is one: their memory is in use as long as it is."""
    number: int
    """The number of its row."""

    @property
    def data(self) -> Tensor:
        """The bytes of the update, [size]."""
        return self.group.data[self.number]

    @property
    def squares(self) -> Sequence[float]:
        """The sum of the squares of each tensor's values in float64; 0 for integers and bools."""
        return self.group.squares[self.number]

    @property
    def device(self) -> torch.device:
        """The device that holds the update."""
        return self.group.data.device

    def read(self, entry: Entry, start: int, count: int) -> Tensor:
        """See `HeldUpdate.read`."""
        return _values(self.data, entry, start, count)

    def read_with(self, others: Sequence[object], entry: Entry, start: int, count: int) -> Tensor | None:
        """See `HeldUpdate.read_with`. Each group is read at once."""
        held = [other for other in others if isinstance(other, HeldInMemory)]
        if len(held) < len(others):
            return None
        groups = {id(update.group): update.group for update in held}
        firsts = dict(zip(groups, accumulate((len(group.data) for group in groups.values()), initial=0), strict=False))
        rows = [_values(group.data, entry, start, count) for group in groups.values()]
        return tree.rows_of(torch.cat(rows), [firsts[id(update.group)] + update.number for update in held])


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Rows:
    """The updates of several clients."""

    data: Tensor
    """[clients, bytes] on the device, each row with the layout of a file."""
    squares: Sequence[Sequence[float]]
    """[clients][tensors]: for each tensor, by rising offset, the sum of the squares of its values in float64."""

    def update(self, number: int) -> HeldInMemory:
        """One of them."""
        return HeldInMemory(self, number)

    def only(self, numbers: Sequence[int]) -> Rows:
        """Some of them, in memory of their own."""
        return Rows(tree.rows_of(self.data, numbers), [self.squares[number] for number in numbers])


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTogether:
    """The updates of clients that trained in lockstep. Their next states are pending in the run's SimulatedStates."""

    clients: Sequence[str]
    header: UpdateHeader
    """What their headers have in common: all but steps, examples, losses, epochs and seconds."""
    steps: Sequence[int]
    examples: Sequence[int]
    """Numbers of the clients' training examples."""
    losses: Sequence[float | None]
    epochs: Sequence[Sequence[Mapping[str, float]]]
    held: Rows
    own_batches: Sequence[int]
    """Batches of an epoch that the task makes itself; 0 if the run's batch size applies."""


def _values(data: Tensor, entry: Entry, start: int, count: int) -> Tensor:
    """A range of a tensor in the bytes of updates, [..., size]."""
    size = entry.dtype.itemsize
    first = entry.offset + start * size
    part = data[..., first : first + count * size]
    if first % size:  # a payload begins where the one before it ends, which may be an odd byte
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(entry.dtype)


class DeviceMemory:
    """The memory for updates on a device: a share of what was free there when the run began."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        """limit: bytes. None: MEMORY_SHARE of the free memory."""
        self._device = device
        self._limit = int(MEMORY_SHARE * free_bytes(device)) if limit is None else limit
        self._held: WeakSet[Rows] = WeakSet()

    def hold(self, payloads: Sequence[PlacedPayload]) -> Rows | None:
        """Copy the updates of a group of clients. None if they do not fit beside those that are in use.

        payloads: with tensors [clients, ...]. Nobody has to release the rows: they count until the last reference is
        gone.
        """
        size = sum(part.layout.size_bytes for part in payloads)
        clients = _clients(payloads)
        if size * clients + sum(rows.data.nbytes for rows in self._held) > self._limit:
            return None
        try:
            rows = Rows(_packed(payloads, self._device), sums_of_squares(payloads))
        except (MemoryError, torch.OutOfMemoryError):
            return None
        self._held.add(rows)
        return rows


def sums_of_squares(payloads: Sequence[PlacedPayload]) -> list[list[float]]:
    """The sums of the squares in float64 for each update, and each of its tensors by rising offset.

    payloads: with tensors [clients, ...].
    """
    columns: list[Tensor] = []
    for part in payloads:
        for entry in part.layout.entries:
            tensor = part.tensors[entry.name]
            if entry.dtype.is_floating_point:
                together = max(1, _WIDE_BYTES // (8 * max(entry.numel, 1)))
                columns.append(
                    torch.cat([squares_of_rows(some.reshape(len(some), -1)) for some in tensor.split(together)])
                )
            else:
                columns.append(torch.zeros(len(tensor), dtype=torch.float64, device=tensor.device))
    # One transfer for all, because each waits for the device.
    found: list[list[float]] = torch.stack(columns, dim=1).tolist()
    return found


def _packed(payloads: Sequence[PlacedPayload], device: torch.device) -> Tensor:
    """The bytes of the updates, each row as a file has them, [clients, size]."""
    clients, size = _clients(payloads), sum(part.layout.size_bytes for part in payloads)
    # Rows begin where a value of any dtype may.
    rows = torch.zeros(clients, -(-size // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)
    base = 0
    for part in payloads:
        for entry in part.layout.entries:
            values = part.tensors[entry.name].detach().reshape(clients, entry.numel)
            place = rows[:, base + entry.offset : base + entry.end]
            if (base + entry.offset) % entry.dtype.itemsize:  # see `HeldInMemory.read`
                place.copy_(values.clone(memory_format=torch.contiguous_format).view(torch.uint8))
            else:
                place.view(entry.dtype).copy_(values)
        base += part.layout.size_bytes
    return rows[:, :size]


def _clients(payloads: Sequence[PlacedPayload]) -> int:
    return len(next(iter(payloads[0].tensors.values())))


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; of a CPU, what files in memory may take."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
