"""Clients whose owners' gates close and open: who is drawn, what a waiting run says, and who is asked again."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from fl_server import round_work
from fl_server.views import client_status, run_status
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

ON_BATTERY = pb.Availability(reason=pb.UNAVAILABLE_REASON_POWER, detail="power: on battery")
AT_SIX = pb.Availability(
    reason=pb.UNAVAILABLE_REASON_TIME_WINDOW, detail="window: outside 06:00-22:00",
    until=Timestamp(seconds=1_772_344_800),
)  # fmt: skip
WELL = pb.Availability(may_train=True)
BOTH = {"round": {"clients_per_round": 2, "quorum": 2}, "stop": {"rounds": 1}}


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def says(world, device, availability, *assignments):
    """A device's word on itself, and the work that it gives up for it."""
    failures = [
        pb.WorkFailure(key=each.key, reason=pb.FAILURE_REASON_STOPPED, message=availability.detail)
        for each in assignments
    ]
    request = pb.ReportStatusRequest(session_id=device.session, availability=availability, failures=failures)
    await world.service.ReportStatus(request, None)


async def test_a_waiting_run_says_who_may_not_train(world):
    """How many, why, who is first and when that ends; the words follow what the clients say."""
    a, b, _ = [await Device(name).come(world) for name in "abc"]
    await says(world, a, ON_BATTERY)
    await says(world, b, AT_SIX)
    run = await world.create(**BOTH)
    await until(lambda: run.status == "waiting", "it waits")
    assert run_status(run).reason == (
        "1 of 2 clients are here that could be drawn; 2 may not train by their own word (1 power, 1 time window), "
        "first a: power: on battery; the first may again at 2026-03-01 06:00:00 UTC"
    )
    assert run_status(run).eligible_clients == 1
    await says(world, a, WELL)
    await world.completed()


async def test_only_those_that_the_run_could_draw_are_told_of(world):
    """Another site's device on battery is not what this run waits for."""
    await says(world, await Device("a", labels={"site": "north"}).come(world), ON_BATTERY)
    run = await world.create(**BOTH, labels={"site": "south"})
    await until(lambda: run.status == "waiting", "it waits")
    assert run_status(run).reason == "0 of 2 clients are here that could be drawn"


async def test_a_newer_clients_reason_is_shown_all_the_same(world):
    """An enum's number that this coordinator does not know."""
    await says(world, await Device("a").come(world), pb.Availability(reason=99, detail="gravity: too low"))
    run = await world.create(**BOTH)
    await until(lambda: run.status == "waiting", "it waits")
    assert "1 may not train by their own word (1 other), first a: gravity: too low" in run_status(run).reason


async def test_operators_see_the_reason_and_the_end(world):
    """As the client said it."""
    a = await Device("a").come(world)
    await says(world, a, AT_SIX)
    assert client_status(world.fleet, world.fleet.record("a")).availability == AT_SIX


async def test_work_that_is_given_up_is_given_to_another(world):
    """a has begun, its plug is pulled: once b is done, c is drawn in its place, long before the deadline."""
    devices = {name: await Device(name, works=False).come(world) for name in "abc"}
    run = await world.create(**BOTH)
    await until(lambda: run.state.drawn, "it draws")
    first, second = sorted(run.state.drawn)
    (third,) = devices.keys() - run.state.drawn
    await says(world, devices[first], ON_BATTERY, await devices[first].assigned())
    await devices[second].contribute(world, await devices[second].assigned())
    await devices[third].contribute(world, await devices[third].assigned())
    await world.completed()
    assert (run.log.commits[0].accepted, run.log.commits[0].attempts) == (2, 2)


async def test_who_gave_up_is_asked_again_as_soon_as_it_may_train(world, monkeypatch):
    """Nobody else is there: the round waits for it, without a new registration, and without the usual retry."""
    monkeypatch.setattr(round_work, "RETRY_S", 3600.0)
    devices = {name: await Device(name, works=False).come(world) for name in "ab"}
    run = await world.create(**BOTH)
    await says(world, devices["a"], ON_BATTERY, await devices["a"].assigned())
    await devices["b"].contribute(world, await devices["b"].assigned())
    await until(lambda: run.status == "waiting", "it waits")
    assert "1 may not train by their own word (1 power)" in run_status(run).reason
    devices["a"].works = True
    await says(world, devices["a"], WELL)
    await world.completed()
    assert len(devices["a"].told("assignment")) > 1


async def test_who_gave_up_and_comes_back_closed_is_spared(world):
    """A link that was cut is no sign that the plug is in again."""
    devices = {name: await Device(name, works=False).come(world) for name in "ab"}
    run = await world.create(**BOTH)
    a = devices["a"]
    await says(world, a, ON_BATTERY, await a.assigned())
    await until(lambda: run.state.out == {"a"}, "a is out")
    await a.leave()
    a.stream = world.spawn(a._attend(world))
    await until(lambda: len(a.told("attached")) == 2, "a is attached again")
    await devices["b"].contribute(world, await devices["b"].assigned())
    await until(lambda: run.status == "waiting", "it waits")
    assert len(a.told("assignment")) == 1


async def test_who_says_the_same_again_changes_nothing(world):
    """Neither who may be drawn nor what is under way is looked at anew."""
    a = await Device("a").come(world)
    await says(world, a, ON_BATTERY)
    version = world.fleet.version
    await says(world, a, ON_BATTERY)
    assert world.fleet.version == version
