"""No leaks: ended runs leave no tasks, metrics or checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fl_server.metrics import Metrics
from fl_server.run import failures
from fl_server.run.run import Run
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def ended_run(world: World, how: str) -> Run:
    """A run that has ended: completed, or stopped by an operator."""
    run = await world.create(stop={"rounds": 1})
    if how == "stopped":
        await world.coordinator.actions.stop(run, "enough", "admin")
    return await world.ended()


@pytest.mark.parametrize("how", ["completed", "stopped"])
async def test_an_ended_run_has_no_tasks(world: World, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The tasks for events, time and computation end with the run."""
    monkeypatch.setattr(failures, "SAVE_EVERY_S", 0.01)
    if how == "completed":
        for name in "ab":
            await Device(name).connect(world)
    before = asyncio.all_tasks()
    run = await ended_run(world, how)
    assert run.status == how
    await until(
        lambda: {task for task in asyncio.all_tasks() - before if not task.done()} <= world.tasks, "none is left"
    )


def runs_with_metrics(world: World) -> set[str]:
    """The runs that have metrics."""
    samples = [sample for metric in world.services.metrics.registry.collect() for sample in metric.samples]
    return {sample.labels["run"] for sample in samples if "run" in sample.labels}


async def test_metrics_are_kept_for_the_runs_that_ended_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one kept: for the second ended run and for the waiting one; before that, for all three."""
    monkeypatch.setattr("fl_server.metrics.RUNS_KEPT", 1)
    runs = [await world.create(name=name) for name in ("first", "second", "third")]
    for run in runs:
        world.services.metrics.rounds.labels(run.id, "committed").inc()
    assert runs_with_metrics(world) == {"first", "second", "third"}
    for run in runs[:2]:
        await world.coordinator.actions.stop(run, "enough", "admin")
    await until(lambda: runs_with_metrics(world) == {"second", "third"}, "the first one's are gone")
    world.services.metrics.update_conflicts.labels("first").inc()
    assert runs_with_metrics(world) == {"second", "third"}


def test_metrics_of_a_run_that_was_extended_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extended run does not count as an ended one when another run ends."""
    monkeypatch.setattr("fl_server.metrics.RUNS_KEPT", 1)
    metrics = Metrics(CollectorRegistry())
    for run in "ab":
        metrics.reported.started(run)
        metrics.attempts.labels(run).inc()
    metrics.reported.ended("a", ended_at=1.0)
    metrics.reported.started("a")
    metrics.reported.ended("b", ended_at=2.0)
    assert [metrics.registry.get_sample_value("fl_attempts_total", {"run": run}) for run in "ab"] == [1, 1]


def test_the_runs_with_metrics_do_not_depend_on_the_order_of_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator restores runs by their creation; metrics are kept for those that ended last."""
    monkeypatch.setattr("fl_server.metrics.RUNS_KEPT", 1)
    metrics = Metrics(CollectorRegistry())
    metrics.reported.ended("created first, ended last", ended_at=9.0)
    metrics.reported.ended("created last", ended_at=5.0)
    assert [run in metrics.reported for run in ("created first, ended last", "created last")] == [True, False]


EVALUATED = {
    "stop": {"rounds": 2, "metric": "clients_accuracy_mean"},
    "evaluation": {"clients_every": 1, "every": 0},
    "keep_checkpoints": 1,
}


async def evaluated_run_of_two_rounds(world: World) -> list[Device]:
    """Devices that were asked to evaluate rounds 0 and 1; round 1 is the last."""
    devices = [await Device(name, eval_examples=10).connect(world) for name in "ab"]
    await world.create(**EVALUATED)
    for device in devices:
        await device.asked_to_evaluate(1)
    return devices


async def report_all(world: World, devices: list[Device], round_: int, accuracy: float) -> None:
    """All devices report an evaluation."""
    for device in devices:
        await device.report(world, round_=round_, accuracy=accuracy)


async def test_a_former_best_round_is_not_kept(world: World) -> None:
    """With one checkpoint kept, round 0 is the best until round 1's evaluation; then only round 1 is kept."""
    devices = await evaluated_run_of_two_rounds(world)
    await report_all(world, devices, 0, 0.1)
    await report_all(world, devices, 1, 0.9)
    await world.completed()
    await until(lambda: world.services.checkpoints.rounds("r") == [1], "round 0 is removed")


async def test_an_evaluation_that_outlives_its_run_leaves_no_checkpoint(world: World) -> None:
    """Round 0 may still be the best when the run ends; its checkpoint is removed once its evaluation is worse."""
    devices = await evaluated_run_of_two_rounds(world)
    await report_all(world, devices, 1, 0.9)
    await world.completed()
    assert world.services.checkpoints.rounds("r") == [0, 1]
    await report_all(world, devices, 0, 0.1)
    await until(lambda: world.services.checkpoints.rounds("r") == [1], "round 0 is removed")


async def test_an_evaluation_that_a_restart_ends_leaves_no_checkpoint(tmp_path: Path) -> None:
    """The run had ended and round 0 might have been the best; after the restart no client is asked."""
    async with World(tmp_path) as world:
        await report_all(world, await evaluated_run_of_two_rounds(world), 1, 0.9)
        await world.completed()
    async with World(tmp_path) as world:
        assert world.services.checkpoints.rounds("r") == [1]
