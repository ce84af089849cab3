"""Members of the sum of client states that are away: when operators are warned, how often, and after a restart."""

from __future__ import annotations

import pytest

from fl_ops.states import member_rows
from fl_server.runs.missing_members import rounds_until_missing
from fl_server.views import client_status, run_status
from protos.fl.v1 import admin_pb2
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until
from tests.fl_server.test_lost_states import SCAFFOLD, arrive, events

AFTER = {"missing_after": 5}
LONG = {**SCAFFOLD, "stop": {"rounds": 3000}}


async def away(world, device, run):
    """The device leaves for good, once it is a member."""
    await until(lambda: device.name in run.client_states.members, "it is a member")
    await device.leave()
    await until(lambda: world.fleet.state(device.name) == "lost", "it is lost")


async def test_a_member_that_leaves_is_warned_of_once(tmp_path):
    """By history, metric, note and `fl run show`, each of which names the remedy; and the remedy works."""
    async with World(tmp_path, states=AFTER, reattach_grace_s=0.1) as world:
        devices = [Device(name) for name in "abc"]
        await arrive(world, devices)
        run = await world.create(**LONG)
        await away(world, devices[2], run)
        await until(lambda: run.client_states.missing, "it is missing")
        assert world.metric("fl_state_members_missing", run="r") == 1
        assert world.metric("fl_state_members", run="r") == 3
        ((name, words),) = member_rows(run_status(run))
        assert (name, words[:9]) == ("missing members", "1 of 3: c")
        remedy = "`fl clients forget c` begins the states anew"
        assert remedy in words
        await until(lambda: remedy in client_status(world.fleet, world.fleet.record("c")).note, "the note is there")
        (line,) = [entry for entry in world.store.history("r") if entry.event == "member_missing"]
        assert line.detail.startswith("c has taken no part in run r for 5 committed rounds")
        assert remedy in line.detail
        done = len(run.log.commits)
        await until(lambda: len(run.log.commits) > done + 6, "rounds go on")
        assert events(world).count("member_missing") == 1
        await world.operators.forget("c", "admin")
        await until(lambda: run.record.state_epoch == 1 and len(run.client_states.members) == 2, "the states restart")
        assert world.metric("fl_state_members_missing", run="r") == 0
        await world.coordinator.stop(run, "", "admin")


async def test_a_restart_knows_who_is_missing_and_who_was_warned_of(tmp_path):
    """The ledger has it: the gauge is right at once, and no second line is written."""
    devices = [Device(name) for name in "abc"]
    async with World(tmp_path, states=AFTER, reattach_grace_s=0.1) as world:
        await arrive(world, devices)
        run = await world.create(**LONG)
        await away(world, devices[2], run)
        await until(lambda: "member_missing" in events(world), "operators are warned")
    async with World(tmp_path, states=AFTER, reattach_grace_s=5.0) as world:
        run = world.coordinator.run("r")
        assert run.client_states.missing == {"c"}
        done = len(run.log.commits)
        await arrive(world, devices[:2])
        await until(lambda: len(run.log.commits) > done + 3, "rounds go on")
        assert (run.client_states.missing, events(world).count("member_missing")) == ({"c"}, 1)
        await world.coordinator.stop(run, "", "admin")
        assert world.metric("fl_state_members_missing", run="r") == 0


async def test_a_member_that_comes_back_is_missing_no_more(tmp_path):
    """Its state moves again; should it leave once more, operators are warned once more."""
    async with World(tmp_path, states=AFTER, reattach_grace_s=0.1) as world:
        devices = [Device(name) for name in "abc"]
        await arrive(world, devices)
        run = await world.create(**LONG)
        for times in (1, 2):
            await away(world, devices[2], run)
            await until(lambda times=times: events(world).count("member_missing") == times, "operators are warned")
            await devices[2].come(world)
            done = len(run.log.commits)
            await until(lambda done=done: run.client_states.of("c").key.round >= done, "it takes part again")
            assert run.client_states.missing == frozenset()
        await world.coordinator.stop(run, "", "admin")


async def test_a_present_member_that_is_not_drawn_is_not_missing(tmp_path):
    """Chance, not absence: whoever can be drawn is none of them, however long it was not."""
    async with World(tmp_path, states={"missing_after": 1}) as world:
        await arrive(world, [Device(name) for name in "abc"])
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
async def test_rounds_until_a_member_is_missing(tmp_path, population, round_, rounds):
    """20 by default; where one client is drawn every N/S rounds, three times that."""
    async with World(tmp_path) as world:
        run = await world.create(**{**SCAFFOLD, "population": population, "round": round_})
        assert rounds_until_missing(run) == rounds


async def test_a_method_without_a_sum_has_no_members(tmp_path):
    """Nothing is shown, and the gauge stays at 0."""
    async with World(tmp_path) as world:
        await Device("a").come(world)
        run = await world.create(round={"clients_per_round": 1})
        await world.completed()
        assert not run_status(run).HasField("states")
        assert world.metric("fl_state_members", run="r") == 0
        assert member_rows(admin_pb2.RunStatus()) == []
