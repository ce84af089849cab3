"""Runs that a start cannot load: whose code is to blame fails once; for the rest, the next start tries again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from algorithms import AlgorithmError
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.runs import restoration
from fl_server.runs.creation import LoadedTask, RunLoading, not_loadable
from fl_server.store.errors import StoreUnavailable
from fl_tasks import TaskError
from fl_tasks.errors import TaskFault, TaskTimedOut, is_own_fault
from tests.fl_server.harness import World, until

NO_ROUND = {"round": {"clients_per_round": 2}}


class Failing:
    """Loads no task; counts the tries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.tries = 0

        async def task(loading: RunLoading, config: RunConfig) -> LoadedTask:
            self.tries += 1
            raise error

        monkeypatch.setattr(RunLoading, "task", task)


def raised(error: Exception, cause: BaseException) -> Exception:
    """The error with a cause."""
    error.__cause__ = cause
    return error


OWN = [
    raised(TaskError("model() raised KeyError"), KeyError("age")),
    raised(InvalidInput("task", "one", "none"), raised(TaskError("importing"), SystemExit(2))),
    raised(AlgorithmError("importing"), ZeroDivisionError()),
    TaskFault("ended its process: signal 11"),
]
OF_THE_MACHINE = [
    raised(TaskError("importing"), ModuleNotFoundError("torchaudio")),
    raised(not_loadable(TaskError("data")), raised(TaskError("data"), FileNotFoundError("data.npz"))),
    raised(TaskError("model()"), RuntimeError("can't allocate memory: you tried")),
    TaskError("ended its process: signal 9 (SIGKILL)"),
    InvalidInput("task.name", "a task that this coordinator may load", "mine"),
    TaskTimedOut("it did not end within 300 s"),
]


def test_whose_fault_an_error_is() -> None:
    """What the code raises or ends is its own; a file, a module, memory, time and a configuration are the machine's."""
    assert [is_own_fault(error) for error in OWN] == [True] * len(OWN)
    assert [is_own_fault(error) for error in OF_THE_MACHINE] == [False] * len(OF_THE_MACHINE)


async def test_a_run_whose_code_fails_is_not_tried_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is FAILED with the reason and one row of history. It is loaded when it is resumed, and then it goes on."""
    async with World(tmp_path) as world:
        await world.create(**NO_ROUND)
    with monkeypatch.context() as broken:
        failing = Failing(broken, TaskFault("the import ended its process: signal 11 (SIGSEGV)"))
        for _ in range(2):
            async with World(tmp_path) as world:
                (problem,) = world.coordinator.table.not_loaded.values()
                assert (problem.state, failing.tries) == ("failed", 1)
                assert "signal 11 (SIGSEGV); `fl run resume r` loads it again" in problem.explained
                assert [row.event for row in world.store.history("r")].count("run_failed") == 1
        async with World(tmp_path) as world:
            with pytest.raises(InvalidInput, match="signal 11"):
                await world.coordinator.restoration.load_again("r")
            assert world.coordinator.table.not_loaded.get("r") is not None
    async with World(tmp_path) as world:
        await world.coordinator.restoration.load_again("r")
        run = world.coordinator.run("r")
        await world.coordinator.actions.resume(run, "admin")
        await until(lambda: run.record.state != "failed", "the ledger has the new state")
    async with World(tmp_path) as world:
        assert not world.coordinator.run("r").ended


async def test_what_the_machine_lacks_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing module leaves the run as it was, and each start tries it; with the module it goes on."""
    async with World(tmp_path) as world:
        await world.create(**NO_ROUND)
    with monkeypatch.context() as broken:
        failing = Failing(broken, OF_THE_MACHINE[0])
        for tries in (1, 2):
            async with World(tmp_path) as world:
                (problem,) = world.coordinator.table.not_loaded.values()
                assert (problem.state, failing.tries) == ("", tries)
    async with World(tmp_path) as world:
        assert not world.coordinator.run("r").ended


async def test_code_that_takes_too_long_has_a_second_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have been slow; after the second time limit the run has failed."""
    async with World(tmp_path) as world:
        await world.create(**NO_ROUND)
    failing = Failing(monkeypatch, raised(not_loadable(TaskError("late")), TaskTimedOut("it did not end")))
    async with World(tmp_path) as world:
        (problem,) = world.coordinator.table.not_loaded.values()
        assert (problem.state, failing.tries) == ("failed", 2)


async def test_a_run_is_restored_when_the_database_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is lost while the run is loaded costs a second try, and no start."""
    async with World(tmp_path) as world:
        run_id = (await world.create(**NO_ROUND)).id
    monkeypatch.setattr(restoration, "RETRY_S", 0.01)
    with monkeypatch.context() as away:
        build, tries = RunLoading.build, list[str]()

        async def lost_once(loading: RunLoading, *arguments: Any) -> Any:
            tries.append("")
            if len(tries) == 1:
                raise StoreUnavailable("the connection is lost")
            return await build(loading, *arguments)

        away.setattr(RunLoading, "build", lost_once)
        async with World(tmp_path) as world:
            assert world.coordinator.run(run_id).id == run_id
    assert len(tries) == 2
