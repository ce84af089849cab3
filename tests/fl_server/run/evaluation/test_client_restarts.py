"""Evaluation by clients over a restart of the coordinator: none evaluates twice, and no report is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protos.digests import digest_text
from protos.fl.v1.coordinator_pb2 import MetricSum
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_AVERAGED
from tests.fl_server.client_evaluation import WITH_CLIENT_EVALUATION, round_metrics
from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until


class DiesAfter(Journal):
    """The process dies after so many writes of a name."""

    def __init__(self, name: str, times: int) -> None:
        super().__init__()
        self._name, self._times = name, times

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == self._name and self.writes.count(name) == self._times - 1:
            self.dies_at = name
        return super().call(name, function, *args, **kwargs)


async def evaluate_until_killed(folder: Path, dies_at: str | None, *names: str, **sections: Any) -> list[Device]:
    """Kill a coordinator after a write; returns its devices. "a" has reported on round 0 if there was time for it."""
    devices = [Device(name, eval_examples=10) for name in names]
    async with World(folder, Journal(dies_at)) as world:
        for device in devices:
            await device.connect(world)
        await world.create(**sections)
        if dies_at != "commit":
            await devices[0].asked_to_evaluate()
            if "averaging" in sections:
                world.spawn(devices[0].report(world, accuracy=0.4, averaged_accuracy=0.6))
            else:
                world.spawn(devices[0].report(world, accuracy=0.4))
        await until(lambda: world.journal.dead, "the coordinator is killed")
    return devices


@pytest.mark.parametrize(("dies_at", "times"), [("commit", 1), ("record_evaluation", 1)])
async def test_a_restart_asks_the_clients_without_a_report(tmp_path: Path, dies_at: str | None, times: int) -> None:
    """A kill after the commit or after the first report: the metrics are equal, and no client evaluates twice."""
    a, b = await evaluate_until_killed(tmp_path, dies_at, "a", "b", **WITH_CLIENT_EVALUATION)
    received = len(a.pushed("evaluation"))
    async with World(tmp_path) as world:
        await asyncio.gather(a.connect(world), b.connect(world))
        if dies_at == "commit":
            await a.asked_to_evaluate(times=received + 1)
            await a.report(world, accuracy=0.4)
        await b.asked_to_evaluate(times=len(b.pushed("evaluation")) or times)
        await b.report(world, accuracy=0.8)
        await world.completed()
        assert len(a.pushed("evaluation")) == times
        assert round_metrics(world)["clients_accuracy_mean"] == pytest.approx(0.6)
        assert "accuracy" in round_metrics(world)


@pytest.mark.parametrize("dies_at", ["commit", "record_evaluation"])
async def test_a_restart_sends_the_same_averaged_model(tmp_path: Path, dies_at: str) -> None:
    """The one whose digest the ledger has, with the bytes of that digest; metrics of both models are kept."""
    sections = {
        "stop": {"rounds": 1},
        "averaging": {"method": "ema", "decay": 0.5},
        "evaluation": {"clients_every": 1, "every": 0, "averaged_on_clients": True},
    }
    a, b = await evaluate_until_killed(tmp_path, dies_at, "a", "b", **sections)
    received = len(a.pushed("evaluation"))
    async with World(tmp_path) as world:
        await asyncio.gather(a.connect(world), b.connect(world))
        if dies_at == "commit":
            await a.asked_to_evaluate(times=received + 1)
            await a.report(world, accuracy=0.4, averaged_accuracy=0.6)
        assignment = await b.asked_to_evaluate(times=len(b.pushed("evaluation")) or 1)
        [averaged] = [each for each in assignment.resources if each.kind == RESOURCE_KIND_AVERAGED]
        assert digest_text(averaged.digest.value) == world.store.commits("r")[0].averaged_digest
        _, layout, data = await b.fetch(world, averaged.digest)
        assert layout.digest(data) == averaged.digest.value
        await b.report(world, accuracy=0.8, averaged_accuracy=1.0)
        await world.completed()
        assert round_metrics(world)["clients_accuracy_mean"] == pytest.approx(0.6)
        assert round_metrics(world)["clients_averaged_accuracy_mean"] == pytest.approx(0.8)


SUMS = "tests.processes.tiny_task:TinyWithSums"


def share(right: int) -> list[MetricSum]:
    """The sums of ten examples with so many right answers."""
    sums = {"right": float(right), "all": 10.0}
    return [MetricSum(metric="share", name=name, values=[value]) for name, value in sums.items()]


@pytest.mark.parametrize("reported", ["one", "both", "summarised"])
async def test_sums_survive_a_restart_until_the_round_has_its_metrics(tmp_path: Path, reported: str) -> None:
    """A kill after one report, after the last one, and after the summary: one value from all sums, and none is kept."""
    world_of = partial(World, tmp_path, tasks=[SUMS])
    a, b = (Device(name, eval_examples=10, task=SUMS) for name in "ab")
    sections = {"stop": {"rounds": 1}, "evaluation": {"clients_every": 1, "every": 0}}
    dies_after = {"one": ("record_evaluation", 1), "both": ("record_evaluation", 2), "summarised": ("set_metrics", 1)}
    async with world_of(journal=DiesAfter(*dies_after[reported])) as world:
        await asyncio.gather(a.connect(world), b.connect(world))
        await world.create(task={"name": SUMS, "options": {"model": "batchnorm"}}, **sections)
        for device in (a, b):
            await device.asked_to_evaluate()
        world.spawn(a.report(world, sums=share(3), accuracy=0.5))
        await until(lambda: world.store.evaluations("r", 0), "it is stored")
        if reported != "one":
            world.spawn(b.report(world, sums=share(10), accuracy=0.5))
        await until(lambda: world.journal.dead, "the coordinator is killed")
    async with world_of() as world:
        await asyncio.gather(a.connect(world), b.connect(world))
        if reported == "one":
            await b.asked_to_evaluate(times=2)
            await b.report(world, sums=share(10), accuracy=0.5)
        await world.completed()
        assert round_metrics(world)["clients_share"] == 0.65
        assert world.store.evaluation_sums("r", 0, "", 9) == [("a", []), ("b", [])]


async def test_the_evaluation_deadline_stops_with_the_coordinator(tmp_path: Path) -> None:
    """The time left at the stop is the time left after the restart."""
    a = Device("a", eval_examples=10, works=False)
    async with World(tmp_path) as world:
        await a.connect(world)
        evaluation = {"clients_every": 1, "clients_deadline_s": 600}
        run = await world.create(stop={"rounds": 1}, evaluation=evaluation, round={"clients_per_round": 1})
        await a.contribute(world, await a.assigned())
        assert (await a.asked_to_evaluate()).deadline.seconds > 500
        run.client_evaluations._under_way[0].ends -= 560
    async with World(tmp_path) as world:
        await a.connect(world)
        assert 30 < (await a.asked_to_evaluate(times=2)).deadline.ToSeconds() <= 40


async def test_the_evaluation_of_an_earlier_round_ends_with_its_reports(tmp_path: Path) -> None:
    """Round 0 was being evaluated at a kill in round 1: its model is gone, and its only report counts."""
    sections = {"stop": {"rounds": 3}, "evaluation": {"clients_every": 1, "every": 0, "clients_deadline_s": 60}}
    a, b = Device("a", eval_examples=10, works=False), Device("b", eval_examples=10, works=False)
    async with World(tmp_path) as world:
        for device in (a, b):
            await device.connect(world)
        await world.create(**sections)
        for round_ in range(2):
            for device in (a, b):
                await device.contribute(world, await device.assigned(round_))
            await a.asked_to_evaluate(round_)
        await a.report(world, accuracy=0.4)
    async with World(tmp_path) as world:
        await a.connect(world)
        assert round_metrics(world, 0)["clients_evaluated"] == 1
        await a.asked_to_evaluate(1, times=2)
        assert "clients_evaluated" not in round_metrics(world, 1)


async def test_the_evaluation_of_an_ended_run_ends_with_its_reports(tmp_path: Path) -> None:
    """Its model is not sent again; no report is lost, and the run can be extended."""
    sections = {"stop": {"rounds": 5, "metric": "accuracy", "target": 0.01}, "evaluation": {"clients_every": 1}}
    devices = [Device(name, eval_examples=10) for name in "ab"]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.create(**sections)
        await world.completed()
        await devices[0].asked_to_evaluate()
        await devices[0].report(world, accuracy=0.5)
    async with World(tmp_path) as world:
        assert round_metrics(world)["clients_evaluated"] == 1
        for device in devices:
            await device.connect(world)
        run = world.coordinator.run("r")
        await world.coordinator.actions.extend(run, 1, 0.0, "admin")
        await until(lambda: run.rounds.committed == 2, "it continues")


async def test_a_daemon_that_ends_in_its_evaluation_is_waited_for_no_longer(tmp_path: Path) -> None:
    """Two of its processes are asked and end; the third is not asked, and the evaluation is over without it."""
    a, b = (Device(name, eval_examples=10) for name in "ab")
    async with World(tmp_path, quarantine={"restarts": 2}) as world:
        await asyncio.gather(a.connect(world), b.connect(world))
        await world.create(**WITH_CLIENT_EVALUATION)
        await b.asked_to_evaluate()
        await b.report(world, accuracy=0.8)
        await a.asked_to_evaluate()
        for start in ("second", "third"):
            await a.leave()
            a.process = start
            await a.connect(world)
        await world.completed()
        assert len(a.pushed("evaluation")) == 2
        await until(lambda: "clients_accuracy_mean" in round_metrics(world), "the evaluation is summarised")
        assert world.fleet.records.get("a").note.startswith(
            "the daemon restarted while it worked: 2 processes of it had the"
        )
