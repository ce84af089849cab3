"""Client states of a run whose clients all work in one process: tensors with a row for each client, on its device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from algorithms import tree
from algorithms.base import Memory
from fl_client.storage.client_state_store import NextState
from fl_ops.simulate.engines.held import free_bytes
from fl_ops.simulate.run_files import MEMORY_SHARE, SimulatedStates

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
        self._tables: dict[tuple[str, str], Tensor] | None = None
        """The tables by symbol and name; empty if they fit nowhere, None before the first state."""
        self._rows: set[str] = set()
        """Clients whose state is in the tables."""
        self._files: set[str] = set()
        self._next: dict[str, tuple[NextState, int]] = {}
        """The next state is a row of tensors [clients, ...], of this number."""
        self._next_files: set[str] = set()

    def get(self, client: str) -> Memory | None:
        """See `SimulatedStates.get`. The tensors are the caller's."""
        if client in self._rows and self._tables is not None:
            memory: dict[str, dict[str, Tensor]] = {}
            for (symbol, name), table in self._tables.items():
                memory.setdefault(symbol, {})[name] = table[self._numbers[client]].clone()
            return memory
        return super().get(client) if client in self._files else None

    def get_group(self, clients: Sequence[str], initial: Memory) -> Memory | None:
        """See `SimulatedStates.get_group`."""
        missing = [number for number, client in enumerate(clients) if client not in self._rows]
        if len(missing) == len(clients) and self._files.isdisjoint(clients):
            return {
                symbol: tree.map(lambda it: it.expand(len(clients), *it.shape), tensors)
                for symbol, tensors in initial.items()
            }
        if not self._files.isdisjoint(clients) or self._tables is None or not self._fits(initial):
            return None
        numbers = [self._numbers[client] for client in clients]
        memory: dict[str, dict[str, Tensor]] = {}
        for (symbol, name), table in self._tables.items():
            rows = tree.rows_of(table, numbers).to(self._device)
            if missing:
                rows[tree.uploaded(missing, torch.int64, self._device)] = initial[symbol][name]
            memory.setdefault(symbol, {})[name] = rows
        return memory

    def put_next(self, client: str, state: NextState) -> None:
        """See `SimulatedStates.put_next`."""
        if self._accepts(state.at_one):
            self._next[client] = NextState(_one_row(state.at_one), _one_row(state.at_zero)), 0
        else:
            super().put_next(client, state)
            self._next_files.add(client)

    def put_next_group(self, clients: Sequence[str], state: NextState) -> None:
        """See `SimulatedStates.put_next_group`. The tensors are kept as they are until the round counts."""
        first = {symbol: tree.map(lambda it: it[0], tensors) for symbol, tensors in state.at_one.items()}
        if self._accepts(first):
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
            memory = NextState(_rows_of(state.at_one, rows), _rows_of(state.at_zero, rows)).at(clip_factor)
            numbers = [self._numbers[client] for client in clients]
            for (symbol, name), table in (self._tables or {}).items():
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
            self._replace(
                client, {symbol: {name: it.cpu() for name, it in memory[symbol].items()} for symbol in memory}
            )
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

    def _made_for(self, state: Memory) -> dict[tuple[str, str], Tensor]:
        """Tables for states like this one."""
        count = len(self._numbers)
        size = sum(it.nbytes for tensors in state.values() for it in tensors.values())
        for place, limit in self._limits:
            if 2 * size * count <= limit:  # with the next ones
                pinned = place != self._device
                return {
                    (symbol, name): torch.empty(count, *it.shape, dtype=it.dtype, device=place, pin_memory=pinned)
                    for symbol, tensors in state.items()
                    for name, it in tensors.items()
                }
        return {}

    def _fits(self, memory: Memory) -> bool:
        """Whether the tables have a row for a state like this one."""
        tensors = {(symbol, name): it for symbol, named in memory.items() for name, it in named.items()}
        tables = self._tables or {}
        return (
            bool(tables)
            and tensors.keys() == tables.keys()
            and all((it.dtype, it.shape) == (tables[key].dtype, tables[key].shape[1:]) for key, it in tensors.items())
        )


def _one_row(memory: Memory) -> Memory:
    return {symbol: tree.map(lambda it: it.detach().unsqueeze(0), tensors) for symbol, tensors in memory.items()}


def _rows_of(memory: Memory, numbers: list[int]) -> Memory:
    return {
        symbol: tree.map(lambda it: tree.rows_of(it.detach(), numbers), tensors) for symbol, tensors in memory.items()
    }
