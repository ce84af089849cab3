"""What comes and goes leaves nothing behind: runs that are over, clients that are gone, uploads that were cut."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from fl_server import deadline
from fl_server.metrics import Metrics, per_run
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path, reattach_grace_s=0.05) as world:
        yield world


async def over(world, how):
    """A run that is over: done, or stopped by an operator."""
    run = await world.create(stop={"rounds": 1})
    if how == "stopped":
        await world.coordinator.stop(run, "enough", "admin")
    return await world.ended()


@pytest.mark.parametrize("how", ["completed", "stopped"])
async def test_a_run_that_is_over_has_no_tasks(world, monkeypatch, how):
    """However it ended: what took its events, counted its time and computed has ended with it."""
    monkeypatch.setattr(deadline, "KEEP_EVERY_S", 0.01)
    if how == "completed":
        for name in "ab":
            await Device(name).come(world)
    before = asyncio.all_tasks()
    run = await over(world, how)
    assert run.status == how
    await until(
        lambda: {task for task in asyncio.all_tasks() - before if not task.done()} <= world.tasks, "none is left"
    )


def told_of(world):
    """The runs that metrics are told of."""
    samples = [sample for metric in world.parts.metrics.registry.collect() for sample in metric.samples]
    return {sample.labels["run"] for sample in samples if "run" in sample.labels}


async def test_metrics_are_told_of_the_runs_that_ended_last(world, monkeypatch):
    """With one kept: of the second run that is over, and of the one that waits; before, of all three."""
    monkeypatch.setattr(per_run, "RUNS_KEPT", 1)
    runs = [await world.create(name=name) for name in ("first", "second", "third")]
    for run in runs:
        world.parts.metrics.rounds.labels(run.id, "committed").inc()
    assert told_of(world) == {"first", "second", "third"}
    for run in runs[:2]:
        await world.coordinator.stop(run, "enough", "admin")
    await until(lambda: told_of(world) == {"second", "third"}, "the first one's are gone")
    world.parts.metrics.update_conflicts.labels("first").inc()
    assert told_of(world) == {"second", "third"}


def test_metrics_of_a_run_that_was_extended_stay(monkeypatch):
    """It ended, goes on, and is no run that ended long ago when another one ends."""
    monkeypatch.setattr(per_run, "RUNS_KEPT", 1)
    metrics = Metrics(CollectorRegistry())
    for run in "ab":
        metrics.told.goes_on(run)
        metrics.attempts.labels(run).inc()
    metrics.told.over("a", ended_at=1.0)
    metrics.told.goes_on("a")
    metrics.told.over("b", ended_at=2.0)
    assert [metrics.registry.get_sample_value("fl_attempts_total", {"run": run}) for run in "ab"] == [1, 1]


def test_which_runs_are_told_of_does_not_depend_on_when_they_were_read_back(monkeypatch):
    """A coordinator reads them by the time they were made; the ones that ended last are told of."""
    monkeypatch.setattr(per_run, "RUNS_KEPT", 1)
    metrics = Metrics(CollectorRegistry())
    metrics.told.over("made first, ended last", ended_at=9.0)
    metrics.told.over("made last", ended_at=5.0)
    assert [run in metrics.told for run in ("made first, ended last", "made last")] == [True, False]


ASKED = {
    "stop": {"rounds": 2, "metric": "clients_accuracy_mean"},
    "evaluation": {"clients_every": 1, "every": 0},
    "keep_checkpoints": 1,
}


async def asked_about_two_rounds(world):
    """Devices that are asked about the first round and the second, which is the last."""
    devices = [await Device(name, eval_examples=10).come(world) for name in "ab"]
    await world.create(**ASKED)
    for device in devices:
        await device.asked(1)
    return devices


async def say(world, devices, round_, accuracy):
    """All of them report an evaluation."""
    for device in devices:
        await device.report(world, round_=round_, accuracy=accuracy)


async def test_a_best_round_that_the_last_evaluation_beats_is_not_kept(world):
    """With one checkpoint kept, round 0 was the best until the end; then round 1 is, and stays alone."""
    devices = await asked_about_two_rounds(world)
    await say(world, devices, 0, 0.1)
    await say(world, devices, 1, 0.9)
    await world.completed()
    await until(lambda: world.parts.checkpoints.rounds("r") == [1], "round 0 is removed")


async def test_an_evaluation_that_outlives_its_run_leaves_no_checkpoint(world):
    """Round 0 might still be the best when the run is over; once its clients have said that it is not, it goes."""
    devices = await asked_about_two_rounds(world)
    await say(world, devices, 1, 0.9)
    await world.completed()
    assert world.parts.checkpoints.rounds("r") == [0, 1]
    await say(world, devices, 0, 0.1)
    await until(lambda: world.parts.checkpoints.rounds("r") == [1], "round 0 is removed")


async def test_an_evaluation_that_a_restart_ends_leaves_no_checkpoint(tmp_path):
    """The run was over and round 0 might still have been the best; after the restart nobody is asked any more."""
    async with World(tmp_path) as world:
        await say(world, await asked_about_two_rounds(world), 1, 0.9)
        await world.completed()
    async with World(tmp_path) as world:
        assert world.parts.checkpoints.rounds("r") == [1]
