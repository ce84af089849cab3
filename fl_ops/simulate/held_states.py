"""Client states of a run whose clients all work in one process: tensors with a row for each client, on its device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from algorithms import tree
from algorithms.base import Memory
from fl_client.storage.client_state_store import NextState
from fl_ops.simulate.engines.held import free_bytes
from fl_ops.simulate.run_files import MEMORY_SHARE, SimulatedStates, mapped, mapped_next

_CPU = torch.device("cpu")


class HeldStates(SimulatedStates):
    """See `SimulatedStates`. States that do not fit beside what else is in memory are files.

    A state is a row of tensors [clients, ...], one for each of its tensors. They are made with the first state: on the
    device, or in pinned memory of the host if they do not fit there. A state with other tensors than the first one is a
    file, too, and so is one that comes from a save until it is replaced.
    """

    def __init__(self, folder: Path, clients: Collection[str], device: torch.device) -> None:
        """clients: all of the run."""
        super().__init__(folder)
        self._numbers = {client: number for number, client in enumerate(clients)}
        self._device = device
        self._limits = [(place, int(MEMORY_SHARE * free_bytes(place))) for place in dict.fromkeys((device, _CPU))]
        self._tables: Memory | None = None
        """The tables; empty if they fit nowhere, None before the first state."""
        self._rows: set[str] = set()
        """Clients whose state is in the tables."""
        self._files: set[str] = set()
        self._next: dict[str, tuple[NextState, int]] = {}
        """The next state is a row of tensors [clients, ...], of this number."""
        self._next_files: set[str] = set()

    def get(self, client: str) -> Memory | None:
        """See `SimulatedStates.get`. The tensors are the caller's."""
        if client in self._rows and self._tables is not None:
            number = self._numbers[client]
            return mapped(self._tables, lambda table: table[number].clone())
        return super().get(client) if client in self._files else None

    def get_group(self, clients: Sequence[str], initial: Memory) -> Memory | None:
        """See `SimulatedStates.get_group`."""
        missing = [number for number, client in enumerate(clients) if client not in self._rows]
        if len(missing) == len(clients) and self._files.isdisjoint(clients):
            return mapped(initial, lambda it: it.expand(len(clients), *it.shape))
        if not self._files.isdisjoint(clients) or self._tables is None or not self._fits(initial):
            return None
        numbers = [self._numbers[client] for client in clients]
        memory = mapped(self._tables, lambda table: tree.rows_of(table, numbers).to(self._device))
        if missing:
            without = tree.uploaded(missing, torch.int64, self._device)
            for symbol, tensors in memory.items():
                for name, rows in tensors.items():
                    rows[without] = initial[symbol][name]
        return memory

    def put_next(self, client: str, state: NextState) -> None:
        """See `SimulatedStates.put_next`."""
        if self._accepts(state.at_one):
            self._next[client] = mapped_next(state, lambda it: it.detach().unsqueeze(0)), 0
        else:
            super().put_next(client, state)
            self._next_files.add(client)

    def put_next_group(self, clients: Sequence[str], state: NextState) -> None:
        """See `SimulatedStates.put_next_group`. The tensors are kept as they are until the round counts."""
        if self._accepts(mapped(state.at_one, lambda it: it[0])):
            self._next.update({client: (state, number) for number, client in enumerate(clients)})
        else:
            super().put_next_group(clients, state)

    def promote(self, counted: Iterable[tuple[str, float]]) -> None:
        """See `SimulatedStates.promote`."""
        filed: list[tuple[str, float]] = []
        held: dict[tuple[int, float], tuple[NextState, list[str], list[int]]] = {}
        for client, clip_factor in counted:
            if client in self._next:
                state, number = self._next.pop(client)
                _, clients, rows = held.setdefault((id(state), clip_factor), (state, [], []))
                clients.append(client)
                rows.append(number)
            elif client in self._next_files:
                filed.append((client, clip_factor))
        super().promote(filed)
        self._files.update(client for client, _ in filed)
        self._rows.difference_update(client for client, _ in filed)
        for (_, clip_factor), (state, clients, rows) in held.items():
            memory = mapped_next(state, partial(_rows, rows)).at(clip_factor)
            numbers = [self._numbers[client] for client in clients]
            for symbol, tensors in (self._tables or {}).items():
                for name, table in tensors.items():
                    table[tree.uploaded(numbers, torch.int64, table.device)] = memory[symbol][name].to(table.device)
            self._rows.update(clients)
            self._files.difference_update(clients)
            self.changed.update(clients)

    def clients(self) -> set[str]:
        """See `SimulatedStates.clients`."""
        return self._rows | self._files

    def path(self, client: str) -> Path:
        """See `SimulatedStates.path`. A state in memory is written now."""
        if client in self._rows and (memory := self.get(client)) is not None:
            self._replace(client, mapped(memory, lambda it: it.cpu()))
        return super().path(client)

    def put(self, client: str, file: Path) -> None:
        """See `SimulatedStates.put`."""
        super().put(client, file)
        self._files.add(client)
        self._rows.discard(client)

    def drop_pending(self) -> None:
        """See `SimulatedStates.drop_pending`."""
        self._next.clear()
        if self._next_files:
            super().drop_pending()
            self._next_files.clear()

    def remove(self, client: str) -> None:
        """See `SimulatedStates.remove`."""
        super().remove(client)
        self._rows.discard(client)
        self._files.discard(client)

    def remove_all(self) -> None:
        """See `SimulatedStates.remove_all`."""
        super().remove_all()
        self._rows.clear()
        self._files.clear()

    def _accepts(self, memory: Memory) -> bool:
        """Whether a client's next state becomes a row. The tables are made for the first one."""
        if self._tables is None:
            self._tables = self._made_for(memory)
        return self._fits(memory)

    def _made_for(self, state: Memory) -> Memory:
        """Tables for states like this one."""
        count = len(self._numbers)
        size = sum(it.nbytes for tensors in state.values() for it in tensors.values())
        place = next((place for place, limit in self._limits if 2 * size * count <= limit), None)  # with the next ones
        if place is None:
            return {}
        make = partial(torch.empty, device=place, pin_memory=place != self._device)
        return {
            symbol: {name: make(count, *it.shape, dtype=it.dtype) for name, it in tensors.items()}
            for symbol, tensors in state.items()
        }

    def _fits(self, memory: Memory) -> bool:
        """Whether the tables have a row for a state like this one."""
        return bool(self._tables) and _form(memory) == _form(mapped(self._tables or {}, lambda table: table[0]))


def _form(memory: Memory) -> dict[str, dict[str, object]]:
    return {symbol: {name: (it.dtype, it.shape) for name, it in memory[symbol].items()} for symbol in memory}


def _rows(numbers: list[int], tensor: torch.Tensor) -> torch.Tensor:
    return tree.rows_of(tensor.detach(), numbers)
