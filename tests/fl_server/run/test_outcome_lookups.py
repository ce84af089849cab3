"""How much of the ledger is read for the outcomes of pending keys, in statements and rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event

from fl_server.run.rounds import RECENT
from fl_server.runs.coordinator import LISTS_KEPT, MOST_LOOKED_UP
from fl_server.store.records import HistoryRecord
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World


@contextmanager
def count_reads(world: World) -> Iterator[SimpleNamespace]:
    """Counts the statements that read the ledger, and the rows that they return."""
    counted, store = SimpleNamespace(statements=0, rows=0), world.store
    read = store._read

    def on_statement(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        counted.statements += statement.lstrip().upper().startswith("SELECT")

    def counting(doing: str, query: Any, **values: object) -> Any:
        found = read(doing, query, **values)
        # An accepted list is one row, with an entry for each client of its cohort.
        counted.rows += sum(len(row["entries"]) if "entries" in row else 1 for row in found)
        return found

    store._read = counting
    event.listen(store._engine, "before_cursor_execute", on_statement)
    yield counted
    event.remove(store._engine, "before_cursor_execute", on_statement)
    del store._read


async def a_round_of(world: World, clients: int) -> list[Device]:
    """Devices of a committed round that have not received their outcomes."""
    devices = [Device(f"c{number:03}") for number in range(clients)]
    for device in devices:
        await device.connect(world)
    await world.create(round={"clients_per_round": clients}, stop={"rounds": 1})
    await world.completed()
    for device in devices:
        device.outcomes.clear()
    return devices


async def read_at_a_restart(folder: Path, clients: int) -> tuple[int, int]:
    """(statements, rows) read when all clients of a round register again, each with one pending key."""
    async with World(folder) as world:
        devices = await a_round_of(world, clients)
    async with World(folder) as world:
        with count_reads(world) as counted:
            for device in devices:
                answer = await world.service.Register(device.registration(), NO_CONTEXT)
                assert [outcome.counted for outcome in answer.outcomes] == [True]
        return counted.statements, counted.rows


async def test_the_reads_of_a_restart_grow_linearly_with_the_clients(tmp_path: Path) -> None:
    """Three times the clients read three times the rows: one for each client and its entry in the list."""
    few, many = [await read_at_a_restart(tmp_path / str(count), count) for count in (4, 12)]
    assert (few[1], many[1]) == (2 * 4, 2 * 12)
    assert many[0] - few[0] <= 3 * (12 - 4)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def registered(world: World, device: Device, keys: list[ExchangeKey]) -> pb.RegisterResponse:
    """The response to a registration with these pending keys."""
    return await world.service.Register(device.registration(pending=keys), NO_CONTEXT)


async def test_a_repeated_key_is_answered_once(world: World) -> None:
    """A thousand equal keys: one row is read in addition to the list."""
    (device,) = await a_round_of(world, 1)
    with count_reads(world) as counted:
        answer = await registered(world, device, [ExchangeKey(run_id="r")] * 1000)
    assert (len(answer.outcomes), counted.rows) == (1, 2)


@pytest.mark.slow
async def test_one_statement_reads_all_rounds_of_a_run(world: World) -> None:
    """Forty pending rounds read forty rows, as many accepted lists, and the epochs of rounds that are not in memory."""
    device = await Device("a").connect(world)
    await world.create(round={"clients_per_round": 1}, stop={"rounds": 40})
    await world.completed()
    keys = [ExchangeKey(run_id="r", round=round_) for round_ in range(40)]
    with count_reads(world) as counted:
        answer = await registered(world, device, keys)
    assert [outcome.counted for outcome in answer.outcomes] == [True] * 40
    assert counted.rows == 80 + 40 - RECENT
    assert len(world.coordinator.outcomes._lists) == LISTS_KEPT


async def test_no_list_is_read_for_a_client_outside_the_rounds(world: World) -> None:
    """Exchanges that the method does not have, rounds that are not committed, and rounds of other clients."""
    await a_round_of(world, 2)
    other = Device("x")
    keys = [ExchangeKey(run_id="r", round=0, exchange=number) for number in range(500)]
    keys += [ExchangeKey(run_id="r", round=round_) for round_ in (1, 2, 2**32 - 1)]
    with count_reads(world) as counted:
        answer = await registered(world, other, keys)
    assert counted.rows == 0
    assert {outcome.counted for outcome in answer.outcomes} == {False}


async def test_the_keys_looked_up_in_one_call_are_limited(world: World) -> None:
    """256 of 300 committed rounds; keys of unknown runs cost nothing, and all of them are answered."""
    device = await Device("a").connect(world)
    run = await world.create(round={"clients_per_round": 1}, stop={"rounds": 1})
    await world.completed()
    for round_ in range(1, 300):
        commit = replace(run.rounds.recent[round_ - 1], round=round_)
        world.store.commit(commit, HistoryRecord(1.0, "coordinator", "round_committed", "r"))
        run.rounds.add(commit)
    keys = [ExchangeKey(run_id="r", round=round_) for round_ in range(300)]
    unknown = [ExchangeKey(run_id="x", round=round_) for round_ in range(600)]
    answer = await registered(world, device, unknown + keys)
    assert len(answer.outcomes) == 600 + MOST_LOOKED_UP
