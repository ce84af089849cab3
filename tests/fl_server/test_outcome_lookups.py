"""Outcomes that registrations ask about: what is read of the ledger for them, in statements and lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from sqlalchemy import event

from fl_server.coordinator import MOST_LOOKED_UP
from fl_server.outcomes import LISTS_KEPT, OutcomeLookup
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.fl_server.devices import Device
from tests.fl_server.harness import World


@contextmanager
def reads(world: World) -> Iterator[SimpleNamespace]:
    """Statements that read the ledger, and the lines that they gave."""
    counted, store = SimpleNamespace(statements=0, lines=0), world.store
    read = store._read

    def on_statement(_connection, _cursor, statement, *_: object) -> None:
        counted.statements += statement.lstrip().upper().startswith("SELECT")

    def counting(doing, query):
        found = read(doing, query)
        # An accepted list is one line, and as long as its cohort.
        counted.lines += sum(len(row["entries"]) if "entries" in row else 1 for row in found)
        return found

    store._read = counting
    event.listen(store._engine, "before_cursor_execute", on_statement)
    yield counted
    event.remove(store._engine, "before_cursor_execute", on_statement)
    del store._read


async def a_round_of(world, clients):
    """A committed round of so many clients, none of which has heard of it."""
    devices = [Device(f"c{number:03}") for number in range(clients)]
    for device in devices:
        await device.come(world)
    await world.create(round={"clients_per_round": clients}, stop={"rounds": 1})
    await world.completed()
    for device in devices:
        device.outcomes.clear()
    return devices


async def read_at_a_restart(folder, clients):
    """(statements, lines) that are read when all clients of one round register again, with one pending key each."""
    async with World(folder) as world:
        devices = await a_round_of(world, clients)
    async with World(folder) as world:
        with reads(world) as counted:
            for device in devices:
                answer = await world.service.Register(device.registration(), None)
                assert [outcome.counted for outcome in answer.outcomes] == [True]
        return counted.statements, counted.lines


async def test_a_restart_costs_as_much_as_there_are_clients(tmp_path):
    """Three times the clients, three times the lines: one for each, and the accepted list once for all."""
    few, many = [await read_at_a_restart(tmp_path / str(count), count) for count in (4, 12)]
    assert (few[1], many[1]) == (2 * 4, 2 * 12)
    assert many[0] - few[0] <= 3 * (12 - 4)


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def registered(world, device, keys):
    """The answer to a registration with these pending keys."""
    return await world.service.Register(device.registration(pending=keys), None)


async def test_a_key_that_comes_twice_is_answered_once(world):
    """A thousand times the same: one line is read, beside the list."""
    (device,) = await a_round_of(world, 1)
    with reads(world) as counted:
        answer = await registered(world, device, [ExchangeKey(run_id="r")] * 1000)
    assert (len(answer.outcomes), counted.lines) == (1, 2)


async def test_one_statement_reads_all_rounds_of_a_run(world):
    """Forty pending rounds are as many lines, one statement for them, and one for each list."""
    device = await Device("a").come(world)
    await world.create(round={"clients_per_round": 1}, stop={"rounds": 40})
    await world.completed()
    keys = [ExchangeKey(run_id="r", round=round_) for round_ in range(40)]
    with reads(world) as counted:
        answer = await registered(world, device, keys)
    assert [outcome.counted for outcome in answer.outcomes] == [True] * 40
    assert counted.lines == 80
    lookup = world.coordinator._outcomes
    assert isinstance(lookup, OutcomeLookup)
    assert len(lookup._lists) == LISTS_KEPT


async def test_a_client_that_was_in_none_of_them_costs_no_list(world):
    """Exchanges that its method has not, rounds that are not committed, and rounds of others."""
    await a_round_of(world, 2)
    other = Device("x")
    keys = [ExchangeKey(run_id="r", round=0, exchange=number) for number in range(500)]
    keys += [ExchangeKey(run_id="r", round=round_) for round_ in (1, 2, 2**32 - 1)]
    with reads(world) as counted:
        answer = await registered(world, other, keys)
    assert counted.lines == 0
    assert {outcome.counted for outcome in answer.outcomes} == {False}


async def test_so_many_keys_are_looked_up_in_one_call(world):
    """Of 300 committed rounds 256; keys of runs that are over, or unknown, cost nothing and are all answered."""
    device = await Device("a").come(world)
    run = await world.create(round={"clients_per_round": 1}, stop={"rounds": 1})
    await world.completed()
    run.log.commits.update(dict.fromkeys(range(1, 300), run.log.commits[0]))
    keys = [ExchangeKey(run_id="r", round=round_) for round_ in range(300)]
    unknown = [ExchangeKey(run_id="x", round=round_) for round_ in range(600)]
    answer = await registered(world, device, unknown + keys)
    assert len(answer.outcomes) == 600 + MOST_LOOKED_UP
