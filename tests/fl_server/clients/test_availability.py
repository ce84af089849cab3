"""Clients whose gates close and open: draws, the reason of a waiting run, and repeated draws."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from fl_server.clients.client_records import LONGEST_PAUSE_S, FleetListener
from fl_server.rounds import effects
from fl_server.rpc.views import client_status, run_status
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until

ON_BATTERY = pb.Availability(reason=pb.UNAVAILABLE_REASON_POWER, detail="power: on battery")
AT_SIX = pb.Availability(
    reason=pb.UNAVAILABLE_REASON_TIME_WINDOW, detail="window: outside 06:00-22:00",
    until=Timestamp(seconds=1_772_344_800),
)  # fmt: skip
AVAILABLE = pb.Availability(may_train=True)
BOTH = {"round": {"clients_per_round": 2, "quorum": 2}, "stop": {"rounds": 1}}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def report_availability(world: World, device: Device, availability: pb.Availability, *assignments: Any) -> None:
    """Report a device's availability, and the work that it abandons."""
    failures = [
        pb.WorkFailure(key=each.key, reason=pb.FAILURE_REASON_STOPPED, message=availability.detail)
        for each in assignments
    ]
    request = pb.ReportStatusRequest(session_id=device.session, availability=availability, failures=failures)
    await world.service.ReportStatus(request, NO_CONTEXT)


async def test_a_waiting_run_counts_the_unavailable_clients(world: World) -> None:
    """Their number, the reason, the first client and its end; the text follows the clients' reports."""
    a, b, _ = [await Device(name).connect(world) for name in "abc"]
    await report_availability(world, a, ON_BATTERY)
    await report_availability(world, b, AT_SIX)
    run = await world.create(**BOTH)
    await until(lambda: run.status == "waiting", "it waits")
    assert run_status(run).reason == (
        "clients that could be drawn: 1 of 2 here; 2 report that they may not train (1 power, 1 time window), "
        "first a: power: on battery; the first may train again at 2026-03-01 06:00:00 UTC"
    )
    assert run_status(run).eligible_clients == 1
    await report_availability(world, a, AVAILABLE)
    await world.completed()


async def test_a_waiting_run_names_only_clients_that_it_could_draw(world: World) -> None:
    """The run does not wait for another site's device on battery."""
    await report_availability(world, await Device("a", labels={"site": "north"}).connect(world), ON_BATTERY)
    run = await world.create(**BOTH, labels={"site": "south"})
    await until(lambda: run.status == "waiting", "it waits")
    lacks = "it lacks clients with the labels site=south: 0 of 1 here with the task"
    assert run_status(run).reason.startswith(f"clients that could be drawn: 0 of 2 here; {lacks}")
    assert "power" not in run_status(run).reason


async def test_an_unknown_reason_of_a_newer_client_is_shown(world: World) -> None:
    """By its enum number."""
    await report_availability(
        world, await Device("a").connect(world), pb.Availability(reason=cast(Any, 99), detail="gravity: too low")
    )
    run = await world.create(**BOTH)
    await until(lambda: run.status == "waiting", "it waits")
    assert "1 reports that it may not train (1 other), first a: gravity: too low" in run_status(run).reason


async def test_operators_see_the_reason_and_the_end(world: World) -> None:
    """As the client reported them."""
    a = await Device("a").connect(world)
    await report_availability(world, a, AT_SIX)
    assert client_status(world.fleet, world.fleet.records.get("a")).availability == AT_SIX


async def test_abandoned_work_goes_to_another_client(world: World) -> None:
    """a has started and loses power: once b is done, c is drawn instead, long before the deadline."""
    devices = {name: await Device(name, works=False).connect(world) for name in "abc"}
    run = await world.create(**BOTH)
    await until(lambda: run.state.drawn, "it draws")
    first, second = sorted(run.state.drawn)
    (third,) = devices.keys() - run.state.drawn
    await report_availability(world, devices[first], ON_BATTERY, await devices[first].assigned())
    await devices[second].contribute(world, await devices[second].assigned())
    await devices[third].contribute(world, await devices[third].assigned())
    await world.completed()
    assert (run.rounds.recent[0].accepted, run.rounds.recent[0].attempts) == (2, 2)


async def test_a_client_that_abandoned_is_drawn_again_once_available(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other client is present: the round waits for it, without a new registration and without the usual retry."""
    monkeypatch.setattr(effects, "RETRY_S", 3600.0)
    devices = {name: await Device(name, works=False).connect(world) for name in "ab"}
    run = await world.create(**BOTH)
    await report_availability(world, devices["a"], ON_BATTERY, await devices["a"].assigned())
    await devices["b"].contribute(world, await devices["b"].assigned())
    await until(lambda: run.status == "waiting", "it waits")
    assert "1 reports that it may not train (1 power)" in run_status(run).reason
    devices["a"].works = True
    await report_availability(world, devices["a"], AVAILABLE)
    await world.completed()
    assert len(devices["a"].pushed("assignment")) > 1


async def test_a_client_that_abandoned_and_reconnects_unavailable_is_not_drawn(world: World) -> None:
    """A broken connection does not mean that its gates are open again."""
    devices = {name: await Device(name, works=False).connect(world) for name in "ab"}
    run = await world.create(**BOTH)
    a = devices["a"]
    await report_availability(world, a, ON_BATTERY, await a.assigned())
    await until(lambda: run.state.out == {"a"}, "a is out")
    await a.leave()
    a.stream = world.spawn(a._attend(world))
    await until(lambda: len(a.pushed("attached")) == 2, "a is attached again")
    await devices["b"].contribute(world, await devices["b"].assigned())
    await until(lambda: run.status == "waiting", "it waits")
    assert len(a.pushed("assignment")) == 1


async def test_a_repeated_report_changes_nothing(world: World) -> None:
    """Neither the eligible clients nor the open round are checked again."""
    a = await Device("a").connect(world)
    await report_availability(world, a, ON_BATTERY)
    version = world.fleet.changes.version
    await report_availability(world, a, ON_BATTERY)
    assert world.fleet.changes.version == version


async def test_a_report_in_which_the_machine_stands_still_delays_the_next_by_a_second(world: World) -> None:
    """Else a virtual machine that is moved for three seconds would draw nobody for a minute."""
    changes = world.fleet.changes
    changes.listener = SimpleNamespace(fleet_changed=lambda: time.sleep(0.2))  # type: ignore[assignment]  # a double
    changes.changed()
    await until(lambda: changes.reported, "the change is reported")
    changes.listener = FleetListener()
    assert changes._pause_s == LONGEST_PAUSE_S
