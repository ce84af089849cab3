"""A run that lacks clients which it need not wait for: quarantined, banned or lost ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance
from fl_server.rounds.state import Phase, RoundState
from fl_server.rpc.views import run_status
from protos.fl.v1 import admin_pb2
from protos.fl.v1.training_pb2 import Assignment, UpdateHeader
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, run_config, until

FOUR = {"clients_per_round": 4, "quorum": 3}


class Liar(Device):
    """Sends updates with a wrong number of steps."""

    async def update(self, world: World, assignment: Assignment) -> tuple[UpdateHeader, bytes]:
        """The update for an assignment."""
        header, data = await super().update(world, assignment)
        header.num_steps += 1
        return header, data


async def test_one_client_in_quarantine_does_not_stop_a_run(tmp_path: Path) -> None:
    """Four clients, a quorum of three and the default min_clients of four: the run goes on, and says without whom."""
    async with World(tmp_path, quarantine={"after": 1}) as world:
        for device in (*map(Device, "abc"), Liar("d")):
            await device.connect(world)
        run = await world.create(round=FOUR, stop={"rounds": 3})
        await until(lambda: run.rounds.committed >= 1, "the first round is committed")
        assert run_status(run).reason in (
            "goes on without 1 of its clients: 1 in quarantine; first d, in quarantine", "3 rounds are done"
        )  # fmt: skip
        await world.completed()
        assert [commit.accepted for commit in world.store.commits("r")] == [3, 3, 3]
        opened = [entry.detail for entry in world.store.history("r") if entry.event == "attempt_opened"]
        assert sorted("goes on without 1 of its clients" in detail for detail in opened) == [False, True, True]


async def test_a_banned_client_does_not_stop_a_run(tmp_path: Path) -> None:
    """It was banned before the run was made."""
    async with World(tmp_path) as world:
        for name in "abcd":
            await Device(name).connect(world)
        await world.operators.ban("d", "it lies", "admin")
        await world.create(round=FOUR, stop={"rounds": 1})
        await world.completed()
        assert [commit.accepted for commit in world.store.commits("r")] == [3]


async def test_a_client_that_is_lost_for_long_does_not_stop_a_run(tmp_path: Path) -> None:
    """It never came back after the first round: the run waits for `limits.lost_after_s`, and then goes on."""
    async with World(tmp_path, reattach_grace_s=0.1, lost_after_s=0.5) as world:
        devices = [await Device(name).connect(world) for name in "abcd"]
        devices[-1].works = False
        run = await world.create(round=FOUR, stop={"rounds": 3})
        await devices[-1].contribute(world, await devices[-1].assigned())
        await until(lambda: run.rounds.committed == 1, "the first round is committed")
        await devices[-1].leave()
        await world.completed()
        assert [commit.accepted for commit in world.store.commits("r")] == [4, 3, 3]
        opened = [entry.detail for entry in world.store.history("r") if entry.event == "attempt_opened"]
        assert any("lost for long" in detail or "1 lost" in detail for detail in opened), opened


async def test_below_the_quorum_a_run_waits(tmp_path: Path) -> None:
    """Two of four are banned, and three are a quorum."""
    async with World(tmp_path) as world:
        for name in "abcd":
            await Device(name).connect(world)
        for name in "cd":
            await world.operators.ban(name, "it lies", "admin")
        run = await world.create(round=FOUR, stop={"rounds": 1})
        await until(lambda: run.status == "waiting", "it waits")
        assert run_status(run).state == admin_pb2.RUN_STATE_WAITING
        assert run.rounds.committed == 0


@pytest.mark.parametrize(
    ("here", "shut_out", "draws"), [("abcd", 0, True), ("abc", 0, False), ("abc", 1, True), ("ab", 2, False)]
)
def test_a_quorum_is_enough_without_clients_that_are_not_waited_for(here: str, shut_out: int, draws: bool) -> None:
    """The cohort is then the clients that are here."""
    state = RoundState(run_config("r", round=FOUR).policy(), rounds=1)
    state, _ = advance(state, ev.RosterChanged(tuple(here), settled=True, shut_out=shut_out))
    assert state.phase is (Phase.COLLECTING if draws else Phase.SELECTING)
    assert state.goal == (len(here) if draws else 0)
