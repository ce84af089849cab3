"""Eligible clients: by the task's code, by labels, by availability, and for one run at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.fleet_checks import OFFER, eligible
from tests.fl_server.harness import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


@pytest.mark.parametrize("key", ["name", "version", "source"])
async def test_a_task_must_be_the_same_code(world: World, key: str) -> None:
    """The same name, version and source."""
    await Device("a").connect(world)
    assert eligible(world, task={**OFFER, key: "other"}) == ()


async def test_labels_select_clients(world: World) -> None:
    """A run draws clients with all of its labels; they may have more."""
    await Device("a", labels={"site": "north", "gpu": "yes"}).connect(world)
    await Device("b", labels={"site": "south"}).connect(world)
    assert eligible(world, labels={"site": "north"}) == ("a",)
    assert eligible(world, labels={"site": "north", "gpu": "no"}) == ()
    assert eligible(world) == ("a", "b")


async def test_clients_report_their_availability(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unavailable client is not drawn until it reports otherwise; a registration reports it as well."""
    a = await Device("a").connect(world)
    busy = pb.Availability(may_train=False, reason=pb.UNAVAILABLE_REASON_DEVICE_BUSY, detail="a game")
    await world.service.ReportStatus(pb.ReportStatusRequest(session_id=a.session, availability=busy), NO_CONTEXT)
    assert (eligible(world), world.fleet.eligibility.availability("a").detail) == ((), "a game")
    await a.connect(world)
    assert eligible(world) == ("a",)
    registration = a.registration(availability=busy)
    monkeypatch.setattr(a, "registration", lambda: registration)
    await a.connect(world)
    assert eligible(world) == ()


async def test_a_client_works_for_one_run_at_a_time(world: World) -> None:
    """Other runs may draw it after its run has released it."""
    for name in "ab":
        await Device(name).connect(world)
    world.fleet.workers.change("r", {"a"}, set())
    assert (eligible(world, "r"), eligible(world, "s"), world.fleet.workers.run_of("a")) == (
        ("a", "b"),
        ("b",),
        "r",
    )
    version = world.fleet.changes.version
    world.fleet.workers.change("r", set(), set())
    assert world.fleet.changes.version == version
    world.fleet.workers.change("r", set(), {"a"})
    assert (eligible(world, "s"), world.fleet.workers.run_of("a")) == (("a", "b"), "")
