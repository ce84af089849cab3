"""Members of the sum of client states that are missing: when and how often operators are warned."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl_server.rpc.views import client_status, run_status
from fl_server.run.client_warnings import rounds_until_missing
from fl_server.run.run import Run
from fl_web.facts.run import attention
from fl_web.facts.words import known
from protos.fl.v1 import admin_pb2
from tests.fl_server.devices import Device
from tests.fl_server.fleet_checks import Clock
from tests.fl_server.harness import World, until
from tests.fl_server.run.client_states.test_lost_states import SCAFFOLD, connect_all, events

AFTER = {"missing_after": 5}
LONG = {**SCAFFOLD, "stop": {"rounds": 3000}}


async def disconnect_member(world: World, clock: Clock, device: Device, run: Run) -> None:
    """The device leaves after it became a member, and is lost."""
    await until(lambda: device.name in run.client_states.members, "it is a member")
    await device.leave()
    clock.end_grace(world)
    assert world.fleet.attendance.state(device.name) == "lost"


async def test_operators_are_warned_once_of_a_missing_member(tmp_path: Path, clock: Clock) -> None:
    """By history, metric, note and `fl run show`. Each names the remedy, and the remedy works."""
    async with World(tmp_path, states=AFTER) as world:
        devices = [Device(name) for name in "abc"]
        await connect_all(world, devices)
        run = await world.create(**LONG)
        await disconnect_member(world, clock, devices[2], run)
        await until(lambda: run.client_states.missing, "it is missing")
        assert world.metric("fl_state_members_missing", run="r") == 1
        assert world.metric("fl_state_members", run="r") == 3
        ((name, (value,)),) = known(attention(run_status(run)))
        assert isinstance(value, str)
        assert (name, value[:9]) == ("missing members", "1 of 3: c")
        remedy = "`fl clients forget c`"
        assert remedy in value
        await until(
            lambda: remedy in client_status(world.fleet, world.fleet.records.get("c")).note, "the note is there"
        )
        (line,) = [entry for entry in world.store.history("r") if entry.event == "member_missing"]
        assert line.detail.startswith("c has taken no part in run r for 5 committed rounds")
        assert remedy in line.detail
        done = run.rounds.committed
        await until(lambda: run.rounds.committed > done + 6, "further rounds are committed")
        assert events(world).count("member_missing") == 1
        await world.operators.forget("c", "admin")
        await until(lambda: run.record.state_epoch == 1 and len(run.client_states.members) == 2, "the states restart")
        assert world.metric("fl_state_members_missing", run="r") == 0
        await world.coordinator.actions.stop(run, "", "admin")


async def test_a_restart_keeps_missing_members_and_warnings(tmp_path: Path, clock: Clock) -> None:
    """They are in the ledger: the gauge is correct at once, and no second row is written."""
    devices = [Device(name) for name in "abc"]
    async with World(tmp_path, states=AFTER) as world:
        await connect_all(world, devices)
        run = await world.create(**LONG)
        await disconnect_member(world, clock, devices[2], run)
        await until(lambda: "member_missing" in events(world), "operators are warned")
    async with World(tmp_path, states=AFTER) as world:
        run = world.coordinator.run("r")
        assert run.client_states.missing == {"c"}
        done = run.rounds.committed
        await connect_all(world, devices[:2])
        await until(lambda: run.rounds.committed > done + 3, "further rounds are committed")
        assert (set(run.client_states.missing), events(world).count("member_missing")) == ({"c"}, 1)
        await world.coordinator.actions.stop(run, "", "admin")
        assert world.metric("fl_state_members_missing", run="r") == 0


async def test_a_member_that_returns_is_not_missing(tmp_path: Path, clock: Clock) -> None:
    """Its state changes again; if it leaves again, operators are warned again."""
    async with World(tmp_path, states=AFTER) as world:
        devices = [Device(name) for name in "abc"]
        await connect_all(world, devices)
        run = await world.create(**LONG)

        def warnings(times: int) -> bool:
            return events(world).count("member_missing") == times

        def counted_since(round_: int) -> bool:
            outcome = run.client_states.counted("c")
            return outcome is not None and outcome.key.round >= round_

        for times in (1, 2):
            await disconnect_member(world, clock, devices[2], run)
            await until(partial(warnings, times), "operators are warned")
            await devices[2].connect(world)
            await until(partial(counted_since, run.rounds.committed), "it takes part again")
            await until(lambda: not run.client_states.missing, "it is not missing")  # updated when clients are informed
        await world.coordinator.actions.stop(run, "", "admin")


@pytest.mark.slow
async def test_a_present_member_that_is_not_drawn_is_not_missing(tmp_path: Path) -> None:
    """A client that can be drawn is not missing, however long it was not drawn."""
    async with World(tmp_path, states={"missing_after": 1}) as world:
        await connect_all(world, [Device(name) for name in "abc"])
        run = await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 1}, "stop": {"rounds": 40}})
        await world.completed()
        assert "member_missing" not in events(world)
        assert run.record.state_epoch == 0


@pytest.mark.parametrize(
    ("population", "round_", "rounds"),
    [
        (3, {"clients_per_round": 3}, 20),
        (100, {"clients_per_round": 10}, 30),
        (1000, {"clients_per_round": 10}, 300),
        (1000, {"sampling": "bernoulli", "rate": 0.05}, 60),
    ],
)
async def test_rounds_until_a_member_is_missing(
    tmp_path: Path, population: int, round_: dict[str, Any], rounds: int
) -> None:
    """20 by default; three times N/S if one client is drawn every N/S rounds."""
    async with World(tmp_path) as world:
        run = await world.create(**{**SCAFFOLD, "population": population, "round": round_})
        assert rounds_until_missing(run.context, run) == rounds


async def test_a_method_without_a_sum_has_no_members(tmp_path: Path) -> None:
    """Nothing is shown, and the gauge stays at 0."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        run = await world.create(round={"clients_per_round": 1})
        await world.completed()
        assert not run_status(run).HasField("states")
        assert world.metric("fl_state_members", run="r") == 0
        assert known(attention(admin_pb2.RunStatus())) == []
