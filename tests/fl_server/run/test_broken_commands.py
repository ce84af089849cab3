"""A command of the round state machine that fails: the run fails with the reason, and continues as if it had not.

Each command fails once, before or after its work, so that the rest of its event is not carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fl_server.errors import RunBroke
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.run.run import Run
from fl_server.store.errors import StoreError
from tests.fl_server.devices import Device
from tests.fl_server.harness import TIMEOUT_S, World, until
from tests.marks import slow_except

NAMES = ("a", "b")
ROUNDS = {"stop": {"rounds": 2}, "algorithm": {"name": "mime"}}
"""A method with two exchanges, so that every command occurs."""


@dataclass
class Case:
    """One run of which a command fails."""

    world: World
    devices: list[Device]
    run: Run

    async def assigned(self) -> None:
        """Both clients have work and do not do it."""
        for device in self.devices:
            await device.assigned()


Provoke = Callable[[Case], Awaitable[None]]


async def work(case: Case) -> None:
    """All clients deliver."""
    await case.assigned()
    for device in case.devices:
        device.works = True
        case.world.spawn(device.contribute(case.world, await device.assigned()))


async def wait_for_clients(case: Case) -> None:
    """Too few clients: the only ones drain."""
    for name in NAMES:
        await case.world.operators.drain(name, "repair", False, "admin")


async def all_fail(case: Case) -> None:
    """Both clients fail: the quorum is missed, and nobody is left to draw."""
    await case.assigned()
    for name in NAMES:
        case.run.post(ev.WorkFailed(name, "no memory"))


async def stop(case: Case) -> None:
    """An operator stops the run, which cancels the clients' work."""
    await case.assigned()
    with pytest.raises(RunBroke, match="failed during this: .*injected"):
        await case.world.coordinator.actions.stop(case.run, "enough", "admin")


async def lose_states(case: Case) -> None:
    """The round under way is restarted."""
    await case.assigned()
    case.run.post(ev.StatesLost("a client lost its state"))


async def lose_one_state(case: Case) -> None:
    """A client's state restarts alone."""
    await case.assigned()
    case.run.post(ev.StateLost("a", "its disk is new"))


async def lose_too_many(case: Case) -> None:
    """A client has lost its state too often."""
    await case.assigned()
    case.run.post(ev.StateLost("a", "its disk is new", left_out=True))


async def miss_deadline(case: Case) -> None:
    """One client delivers, the other one does not."""
    await case.assigned()
    await case.devices[0].contribute(case.world, await case.devices[0].assigned())
    case.run.post(ev.DeadlinePassed())


async def find_culprit(case: Case) -> None:
    """An accepted update spoils the round."""
    handlers: dict[type, Any] = case.run._effects._handlers  # type: ignore[assignment]  # a mapping to all others
    reduce = handlers[effects.ReduceExchange]

    async def report(command: effects.ReduceExchange) -> None:
        case.run.post(ev.CulpritsFound((("a", "its norm"),)))
        handlers[effects.ReduceExchange] = reduce

    handlers[effects.ReduceExchange] = report
    await work(case)


async def nothing(case: Case) -> None:
    """The command comes with the run itself."""


CASES: dict[type, Provoke] = {
    effects.OpenAttempt: nothing,
    effects.AwaitClients: wait_for_clients,
    effects.QuorumMissed: all_fail,
    effects.RetryLater: all_fail,
    effects.SendWork: lose_one_state,
    effects.RecordFailure: lose_too_many,
    effects.DeadlineMissed: miss_deadline,
    effects.Cancel: stop,
    effects.RestartRound: lose_states,
    effects.ReduceExchange: work,
    effects.ComputeStep: work,
    effects.DropCulprits: find_culprit,
    effects.Commit: work,
    effects.Announce: work,
    effects.EndRun: work,
}


def inject(run: Run, kind: type, done: bool) -> Callable[[], bool]:
    """Let the command fail the next time. Returns whether it has."""
    handlers: dict[type, Any] = run._effects._handlers  # type: ignore[assignment]  # a mapping to all others
    handle, failed = handlers[kind], list[effects.Effect]()

    async def fail_once(command: effects.Effect) -> None:
        if failed:
            await handle(command)
            return
        failed.append(command)
        if done:
            await handle(command)
        raise RuntimeError("injected")

    handlers[kind] = fail_once
    return lambda: bool(failed)


def undisturbed(folder: Path) -> list[str]:
    """The digests of the run without a failure."""

    async def run() -> list[str]:
        async with World(folder) as world:
            for name in NAMES:
                await Device(name).connect(world)
            await world.create(**ROUNDS)
            return await world.completed()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of the run without a failure."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


async def broken(world: World, kind: type, done: bool, devices: list[Device]) -> Run:
    """A run of which the command has failed."""
    for device in devices:
        await device.connect(world)
    if kind is effects.AwaitClients:
        for device in devices:
            await world.operators.drain(device.name, "repair", False, "admin")
    start = Run.start
    ready: list[Callable[[], bool]] = []

    def start_with_fault(run: Run) -> None:
        ready.append(inject(run, kind, done))
        start(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "start", start_with_fault)  # before the first event
        run = await world.create(**ROUNDS)
    await CASES[kind](Case(world, devices, run))
    await until(ready[0], f"{kind.__name__} fails")
    await run.wait_until_ended(TIMEOUT_S)
    return run


def test_every_command_has_a_case() -> None:
    """A new command is tried too. Stages of secure aggregation need certificates, and are tried with processes."""
    assert set(CASES) == set(effects.Effect.__args__) - {effects.OpenStage}


@pytest.mark.slow
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "kind", slow_except(CASES, effects.OpenAttempt, effects.ComputeStep, effects.Commit), ids=lambda kind: kind.__name__
)
async def test_a_command_that_fails_fails_the_run(tmp_path: Path, kind: type, done: bool, expected: list[str]) -> None:
    """The reason is shown and in the ledger, nothing is reserved, and a resumed run makes the models of the others."""
    devices = [Device(name, works=False) for name in NAMES]
    async with World(tmp_path) as world:
        run = await broken(world, kind, done, devices)
        assert run.state.ending is not None
        assert "injected" in run.state.ending[1]
        assert [(each.state, "injected" in each.reason) for each in world.store.runs()] == [("failed", True)]
        assert not run.model.loaded
        assert [world.fleet.workers.run_of(name) for name in NAMES] == ["", ""]
        for device in devices:
            device.works = True
            await world.operators.drain(device.name, "", True, "admin")
        await world.coordinator.actions.resume(run, "admin")
        assert await world.completed() == expected


@pytest.mark.parametrize(
    "kind",
    slow_except([effects.OpenAttempt, effects.RestartRound, effects.Announce], effects.Announce),
    ids=lambda kind: kind.__name__,
)
async def test_a_restarted_coordinator_finds_the_same_failed_run(
    tmp_path: Path, kind: type, expected: list[str]
) -> None:
    """It shows the reason, and a resumed run makes the same models."""
    devices = [Device(name, works=False) for name in NAMES]
    async with World(tmp_path) as world:
        reason = (await broken(world, kind, True, devices)).state.ending
    async with World(tmp_path) as world:
        run = world.coordinator.run("r")
        assert run.state.ending == reason
        for device in devices:
            device.works = True
            await device.connect(world)
            await world.operators.drain(device.name, "", True, "admin")
        await world.coordinator.actions.resume(run, "admin")
        assert await world.completed() == expected


async def test_a_failure_that_cannot_be_written_is_repeated_from_the_ledger(
    tmp_path: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is failed in memory and releases what it holds. The next start continues where the ledger is."""
    devices = [Device(name) for name in NAMES]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)

        def damaged(*_: object) -> None:
            raise StoreError("the database is damaged")

        with monkeypatch.context() as patch:
            run = await world.create(**ROUNDS)
            patch.setattr(world.store, "fix_accepted", damaged)
            patch.setattr(world.store, "update_run", damaged)
            await until(lambda: run.status == "failed" and not run.model.loaded, "the run fails")
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        assert await world.completed() == expected


async def test_a_request_whose_call_is_cancelled_is_carried_out(tmp_path: Path) -> None:
    """An operator's command ended while the run worked on it: the run is in the state that was asked for."""
    async with World(tmp_path) as world:
        for name in NAMES:
            await Device(name, works=False).connect(world)
        run = await world.create(**ROUNDS)
        await until(lambda: run.state.outstanding, "a cohort is drawn")
        async with run.turn:
            call = asyncio.create_task(world.coordinator.actions.stop(run, "enough", "admin"))
            await asyncio.sleep(0)
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: run.status == "stopped" and run.record.state == "stopped", "the run is stopped")
