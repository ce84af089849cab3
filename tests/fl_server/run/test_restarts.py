"""A coordinator that is killed after any of its writes, and the coordinator that starts next."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from fl_server.rounds.state import Phase
from fl_server.rpc.views import run_status
from fl_server.run.run import Run
from fl_server.runs import actions
from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until
from tests.fl_server.killed_runs import NAMES, Undisturbed, complete_run, run_with_kill
from tests.marks import slow_except

REGISTERING = ["put_clients"] * 6
ROUND = ["open_attempt", "seal", "record_update", "seal", "record_update", "fix_accepted", "save", "commit"]
RUN = sorted([*REGISTERING, "save", "create_run", *2 * ROUND, *2 * ["set_metrics", "update_run"]])
"""All writes of two rounds; an evaluation is written during the next round."""
DEATHS = range(len(REGISTERING) + 1, len(RUN) + 1)


def test_the_writes_of_a_run(undisturbed: Undisturbed) -> None:
    """Each round writes cohort, updates, list, checkpoint and commit, in that order, and nothing else.

    The updates of two devices may cross.
    """
    _, writes = undisturbed
    assert sorted(writes) == RUN
    rounds = [name for name in writes[len(REGISTERING) + 2 :] if name not in {"set_metrics", "update_run"}]
    for first in (0, len(ROUND)):
        assert [rounds[first], *sorted(rounds[first + 1 : first + 5]), *rounds[first + 5 : first + 8]] == [
            "open_attempt", "record_update", "record_update", "seal", "seal", "fix_accepted", "save", "commit",
        ]  # fmt: skip


@pytest.mark.parametrize("dies_at", slow_except(DEATHS, *DEATHS[::12]))
async def test_a_kill_after_any_write_changes_no_bit(tmp_path: Path, undisturbed: Undisturbed, dies_at: int) -> None:
    """Models, metrics and accepted lists are equal, even if a device lost its computed updates.

    A counted device got its outcome with the digest of its update.
    """
    outcome, devices, _ = await run_with_kill(tmp_path, dies_at)
    assert outcome == undisturbed[0]
    for round_, accepted in enumerate(outcome[2]):
        assert accepted is not None
        for client, digest in accepted:
            received = devices[NAMES.index(client)].outcomes.get(("r", round_, 0))
            assert received is None or (received.counted and received.digest.value == digest)


async def test_the_history_records_a_restart(tmp_path: Path) -> None:
    """After the second of two updates: one row for each restart, with the point where the run continued."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path, Journal("fix_accepted")) as world:
        world.spawn(complete_run(world, devices))
        await until(lambda: world.journal.dead, "the coordinator is killed")
    async with World(tmp_path) as world:
        await complete_run(world, devices)
        details = [entry.detail for entry in world.store.history("r") if entry.event == "run_recovered"]
        assert details == ["round 0: updates of 2 of 2 clients are here"]


async def test_a_target_reached_before_a_kill_ends_the_run(tmp_path: Path) -> None:
    """The ledger has the evaluation but not the end: no further round follows."""
    sections: dict[str, Any] = {"stop": {"rounds": 5, "metric": "accuracy", "target": 0.01}}
    undisturbed, _, _ = await run_with_kill(tmp_path / "undisturbed", **sections)
    disturbed, _, _ = await run_with_kill(tmp_path / "disturbed", "set_metrics", **sections)
    assert disturbed == undisturbed
    assert len(disturbed[0]) == 1


async def test_a_completed_run_can_be_extended_after_a_restart(tmp_path: Path) -> None:
    """It continues from its last round, and its next round accepts updates."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path) as world:
        first = await complete_run(world, devices)
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = world.coordinator.run("r")
        await world.coordinator.actions.extend(run, 1, 0.0, "admin")
        await until(lambda: run.rounds.committed == 3, "the added round is committed")
        digests = await world.completed()
        assert digests[:2] == first


async def test_a_restart_keeps_the_over_selection_factor(tmp_path: Path) -> None:
    """The ledger has the factor after a committed round: 1.5 + 0.2 * (1.1 - 1.5) = 1.42 without drop-outs."""
    devices = [Device(name) for name in NAMES]
    over = {"round": {"clients_per_round": 2, "close": "goal", "over_selection": 1.5, "min_clients": 3}}
    async with World(tmp_path) as world:
        await complete_run(world, devices, **over, stop={"rounds": 1})
        assert world.metric("fl_over_selection", run="r") == pytest.approx(1.42)
    async with World(tmp_path) as world:
        run = world.coordinator.run("r")
        assert run_status(run).over_selection == pytest.approx(1.42)
        assert run.state.over_selection == pytest.approx(1.42)
        assert run.state.over_selection == run.rounds.recent[0].over_selection


async def test_an_interrupted_end_is_finished_at_the_next_start(tmp_path: Path) -> None:
    """The ledger has the stop, but the open round was not yet abandoned: nothing of the round remains."""
    devices = [Device(name, works=False) for name in NAMES[:2]]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create()
        await devices[0].contribute(world, await devices[0].assigned())
        save = run.run_status.save

        async def killed_in_save(event: str = "", told: str = "") -> None:
            world.journal.dies_at = "update_run"
            await save(event, told)

        run.run_status.save = killed_in_save  # type: ignore[method-assign]
        stopping = world.spawn(world.coordinator.actions.stop(run, "", "admin"))
        await until(lambda: world.journal.dead, "the coordinator is killed")
        await asyncio.gather(stopping, return_exceptions=True)
        assert len(world.store.updates("r", 0, 0)) == 1
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").status == "stopped"
        assert (world.store.updates("r", 0, 0), world.services.spool.sweep()) == ([], [])


async def test_a_paused_run_is_paused_after_a_restart(tmp_path: Path) -> None:
    """Its open round continues, and no other round is drawn."""
    devices = [Device(name, works=False) for name in NAMES[:2]]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create()
        await devices[0].assigned()
        await world.coordinator.actions.pause(run, "admin")
    async with World(tmp_path) as world:
        for device in devices:
            device.works = True
            await device.connect(world)
        run = world.coordinator.run("r")
        await until(lambda: run.rounds.committed == 1, "the open round is committed")
        await until(lambda: run.state.phase is Phase.SELECTING, "it is between two rounds")
        assert (run.status, run.state.drawn) == ("paused", frozenset())


async def test_a_stop_during_the_step_is_kept_over_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator was answered: the next coordinator ends the run too, in place of another round."""
    devices = [Device(name) for name in NAMES]
    monkeypatch.setattr(actions, "_STOP_S", 0.0)
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create(stop={"rounds": 50})
        spawn = run.spawn
        monkeypatch.setattr(run, "spawn", lambda work: spawn(_stops(world, run, work)))
        await until(lambda: world.journal.dead, "the coordinator is killed")
    async with World(tmp_path) as world:
        assert world.store.runs()[0].stopping == "enough"
        run = await world.ended()
        assert (run.status, run.record.reason) == ("stopped", "enough")


async def _stops(world: World, run: Run, work: Coroutine[Any, Any, None]) -> None:
    """Work of a run; the operator stops it during the step, and the coordinator is killed then."""
    if run.state.phase is not Phase.STEPPING or world.journal.dead:
        await work
        return
    await world.coordinator.actions.stop(run, "enough", "admin")
    world.journal.dead = True
    work.close()


async def test_a_restart_keeps_the_count_of_lost_clients(tmp_path: Path) -> None:
    """One of two devices is lost, the coordinator starts again, and the other one delivers."""
    round_ = {"clients_per_round": 2, "quorum": 1}
    async with World(tmp_path, reattach_grace_s=2.0) as world:
        quiet, gone = [await Device(name, works=False).connect(world) for name in "ab"]
        run = await world.create(round=round_, stop={"rounds": 1})
        await asyncio.gather(quiet.assigned(), gone.assigned())
        await gone.leave()
        await until(lambda: not run.state.works("b"), "b is lost")
        assert run.rounds.statistics.assignments == {"lost": 1}
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").rounds.statistics.assignments == {"lost": 1}
        await Device("a").connect(world)
        await world.completed()
        account = run_status(world.coordinator.run("r")).latest.account
    assert account.assignments == {"lost": 1, "admitted": 1}


async def test_a_restart_keeps_the_count_of_cancelled_clients(tmp_path: Path) -> None:
    """The first exchange closes with two of three updates; the coordinator starts again in the second one."""
    goal = {"clients_per_round": 2, "close": "goal", "over_selection": 1.5, "quorum": 2, "min_clients": 3}
    sections = {"algorithm": {"name": "mime"}, "round": goal, "stop": {"rounds": 1}}
    expected = {"admitted": 2, "cancelled": 1}
    async with World(tmp_path) as world:
        devices = [await Device(name, works=False).connect(world) for name in "abc"]
        run = await world.create(**sections)
        for device in devices[:2]:
            await device.contribute(world, await device.assigned(0, 0))
        await until(lambda: run.state.exchange == 1 and run.state.collects, "the second exchange is open")
        assert run.rounds.statistics.assignments == expected
    async with World(tmp_path) as world:
        assert world.coordinator.run("r").rounds.statistics.assignments == expected
