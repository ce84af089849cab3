"""Evaluation on clients when the coordinator comes back: nobody answers twice, and no answer is lost."""

from __future__ import annotations

import asyncio

import pytest

from tests.fl_server.asking import ASKING, metrics
from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until


async def asked_until_dead(folder, dies_at, *names, **sections):
    """A coordinator that dies behind a write, and its devices; "a" has answered about round 0 if it got so far."""
    devices = [Device(name, eval_examples=10) for name in names]
    async with World(folder, Journal(dies_at)) as world:
        for device in devices:
            await device.come(world)
        await world.create(**sections)
        if dies_at != "commit":
            await devices[0].asked()
            world.spawn(devices[0].report(world, accuracy=0.4))
        await until(lambda: world.journal.dead, "it dies")
    return devices


@pytest.mark.parametrize(("dies_at", "times"), [("commit", 1), ("record_evaluation", 1)])
async def test_a_restart_asks_those_who_have_not_answered(tmp_path, dies_at, times):
    """Death behind the commit or behind the first answer: the same numbers, and nobody answers twice."""
    a, b = await asked_until_dead(tmp_path, dies_at, "a", "b", **ASKING)
    heard = len(a.told("evaluation"))
    async with World(tmp_path) as world:
        await asyncio.gather(a.come(world), b.come(world))
        if dies_at == "commit":
            await a.asked(times=heard + 1)
            await a.report(world, accuracy=0.4)
        await b.asked(times=len(b.told("evaluation")) or times)
        await b.report(world, accuracy=0.8)
        await world.completed()
        assert len(a.told("evaluation")) == times
        assert metrics(world)["clients_accuracy_mean"] == pytest.approx(0.6)
        assert "accuracy" in metrics(world)


async def test_the_time_to_answer_stands_still_while_nobody_serves(tmp_path):
    """What was left when the coordinator stopped is left after the restart, not the whole time anew."""
    a = Device("a", eval_examples=10, works=False)
    async with World(tmp_path) as world:
        await a.come(world)
        evaluation = {"clients_every": 1, "clients_deadline_s": 600}
        run = await world.create(stop={"rounds": 1}, evaluation=evaluation, round={"clients_per_round": 1})
        await a.contribute(world, await a.assigned())
        assert (await a.asked()).deadline.seconds > 500
        run.client_evaluations._under_way[0].ends -= 560
    async with World(tmp_path) as world:
        await a.come(world)
        assert 30 < (await a.asked(times=2)).deadline.ToSeconds() <= 40


async def test_earlier_rounds_come_to_what_was_there(tmp_path):
    """Round 0 was being evaluated when the coordinator died in round 1: its model is gone, its one answer counts."""
    sections = {"stop": {"rounds": 3}, "evaluation": {"clients_every": 1, "every": 0, "clients_deadline_s": 60}}
    a, b = Device("a", eval_examples=10, works=False), Device("b", eval_examples=10, works=False)
    async with World(tmp_path) as world:
        for device in (a, b):
            await device.come(world)
        await world.create(**sections)
        for round_ in range(2):
            for device in (a, b):
                await device.contribute(world, await device.assigned(round_))
            await a.asked(round_)
        await a.report(world, accuracy=0.4)
    async with World(tmp_path) as world:
        await a.come(world)
        assert metrics(world, 0)["clients_evaluated"] == 1
        await a.asked(1, times=2)
        assert "clients_evaluated" not in metrics(world, 1)


async def test_a_run_that_had_ended_comes_to_what_was_there(tmp_path):
    """Its model is not sent out again; nothing it knew is lost, and it can be extended."""
    sections = {"stop": {"rounds": 5, "target": 0.01}, "evaluation": {"clients_every": 1}}
    devices = [Device(name, eval_examples=10) for name in "ab"]
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        await world.create(**sections)
        await world.completed()
        await devices[0].asked()
        await devices[0].report(world, accuracy=0.5)
    async with World(tmp_path) as world:
        assert metrics(world)["clients_evaluated"] == 1
        for device in devices:
            await device.come(world)
        run = world.coordinator.run("r")
        await world.coordinator.extend(run, 1, 0.0, "admin")
        await until(lambda: len(run.log.commits) == 2, "it goes on")
