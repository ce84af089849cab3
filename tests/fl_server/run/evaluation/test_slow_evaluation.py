"""An evaluation on the server that takes long: the run answers all calls, and no result is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_server.aggregation.snapshot import RunModel, Snapshot
from fl_server.rounds.state import Phase
from fl_server.run.run import Run
from fl_server.store.errors import StoreFull
from fl_server.store.records import ClientEvaluation
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment, ExchangeKey
from tests.fl_server.client_evaluation import WITH_CLIENT_EVALUATION
from tests.fl_server.devices import Device
from tests.fl_server.harness import TIMEOUT_S, World, until


class Slow:
    """Lets the evaluation of round 0 wait until it is released."""

    def __init__(self) -> None:
        self.began, self.released = threading.Event(), threading.Event()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Round 0 is evaluated slowly."""
    slow, evaluate = Slow(), RunModel.evaluate

    def wait(model: RunModel, snapshot: Snapshot) -> dict[str, float]:
        if snapshot.round == 0:
            slow.began.set()
            slow.released.wait()
        return evaluate(model, snapshot)

    monkeypatch.setattr(RunModel, "evaluate", wait)
    yield slow
    slow.released.set()


@asynccontextmanager
async def coordinator(folder: Path, slow: Slow) -> AsyncIterator[World]:
    """A coordinator that can stop: its threads end once the evaluation is released."""
    async with World(folder) as world:
        try:
            yield world
        finally:
            slow.released.set()


async def two_rounds_later(world: World, **sections: Any) -> Run:
    """A run that has committed round 1, and whose round 0 is still evaluated."""
    for name in "ab":
        await Device(name).connect(world)
    run = await world.create(**{"stop": {"rounds": 9}, **sections})
    await until(lambda: run.rounds.committed == 2 and run.state.phase is Phase.EVALUATING, "round 1 is committed")
    return run


async def evaluated(world: World, rounds: int) -> list[Mapping[str, float]]:
    """Wait until the ledger has the metrics of all of so many rounds."""

    def metrics() -> list[Mapping[str, float]] | None:
        found = [commit.metrics for commit in world.store.commits("r")]
        return found if len(found) == rounds and all(found) else None

    return await until(metrics, "all are evaluated")


async def test_a_pause_and_a_stop_are_answered_during_an_evaluation(tmp_path: Path, slow: Slow) -> None:
    """Both take effect at once. The evaluations go on after the end, and their results are in their rounds."""
    async with coordinator(tmp_path, slow) as world:
        run = await two_rounds_later(world)
        await asyncio.wait_for(world.coordinator.actions.pause(run, "admin"), TIMEOUT_S)
        assert run.status == "paused"
        await asyncio.wait_for(world.coordinator.actions.stop(run, "enough", "admin"), TIMEOUT_S)
        assert (run.status, run.rounds.committed, run.model.loaded) == ("stopped", 2, False)
        assert not slow.released.is_set()
        slow.released.set()
        stored = await evaluated(world, 2)
        assert stored == [commit.metrics for commit in run.rounds.recent.values()]


async def test_a_client_is_answered_during_an_evaluation(tmp_path: Path, slow: Slow) -> None:
    """A late report of a failure takes its turn in the run."""
    async with coordinator(tmp_path, slow) as world:
        await two_rounds_later(world)
        device = await Device("a", works=False).connect(world)
        key = ExchangeKey(run_id="r", round=1)
        report = device.report_failure(world, Assignment(key=key), pb.FAILURE_REASON_NOT_FINITE)
        await asyncio.wait_for(report, TIMEOUT_S)
        assert not slow.released.is_set()


async def test_the_next_round_begins_after_the_evaluation(tmp_path: Path, slow: Slow) -> None:
    """At most one model waits for its evaluation."""
    async with coordinator(tmp_path, slow) as world:
        run = await two_rounds_later(world, stop={"rounds": 4})
        assert (run.state.round, run.state.awaited, run.state.goal) == (2, frozenset({"earlier"}), 0)
        slow.released.set()
        await world.completed()
        await evaluated(world, 4)


async def test_an_evaluation_that_a_restart_cut_short_is_made_up(tmp_path: Path, slow: Slow) -> None:
    """Also the one of the round before the latest; the values are those of an undisturbed run."""
    async with coordinator(tmp_path / "disturbed", slow) as world:
        await two_rounds_later(world, stop={"rounds": 3})
        await world.coordinator.close()
        slow.released.set()
    metrics = []
    for name in ("disturbed", "undisturbed"):
        async with World(tmp_path / name) as world:
            for client in "ab":
                await Device(client).connect(world)
            if name == "undisturbed":
                await world.create(stop={"rounds": 3})
            await world.completed()
            metrics.append(await evaluated(world, 3))
    assert metrics[0] == metrics[1]


async def test_a_run_that_is_over_does_not_wait_for_its_evaluation(tmp_path: Path, slow: Slow) -> None:
    """Its time is over: it is completed at once, and can be extended."""
    async with coordinator(tmp_path, slow) as world:
        run = await two_rounds_later(world, stop={"rounds": 9, "wall_time_s": 1000.0})
        run.state = replace(run.state, elapsed_s=1000.0)
        await until(lambda: run.status == "completed" and run.record.ended_at, "it is completed")
        assert not slow.released.is_set()
        await asyncio.wait_for(world.coordinator.actions.extend(run, 1, 1000.0, "admin"), TIMEOUT_S)
        assert run.status in {"running", "waiting"}


async def test_the_last_evaluation_of_a_run_that_is_over_is_made_up(tmp_path: Path, slow: Slow) -> None:
    """The coordinator stops after the end of the run, and before the end of the evaluation."""
    async with coordinator(tmp_path, slow) as world:
        run = await two_rounds_later(world, stop={"rounds": 9, "wall_time_s": 1000.0})
        run.state = replace(run.state, elapsed_s=1000.0)
        await until(lambda: run.status == "completed" and run.record.ended_at, "it is completed")
        await world.coordinator.close()
        slow.released.set()
    async with coordinator(tmp_path, slow) as world:
        await evaluated(world, 2)


@pytest.mark.parametrize("turns", range(6))
async def test_a_run_that_closes_as_its_evaluation_ends_waits_for_no_disk(tmp_path: Path, turns: int) -> None:
    """In each turn of the event loop after the last answer: a cancellation is not lost, and no write is tried again."""
    async with World(tmp_path) as world:
        device = await Device("a", eval_examples=10).connect(world)
        run = await world.create(**WITH_CLIENT_EVALUATION, round={"clients_per_round": 1})
        await device.asked_to_evaluate()
        ends, run.client_evaluations.answers = run.client_evaluations._under_way[0].over, full  # type: ignore[method-assign]
        ends.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(run.close(), 20.0)
        assert not run._tasks


async def full(round_: int) -> list[ClientEvaluation]:
    """The disk of the ledger is full."""
    raise StoreFull(f"round {round_}")
