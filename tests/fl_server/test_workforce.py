"""Who may be drawn: by the task's code, by labels, by its own word, and for one run at a time."""

from __future__ import annotations

import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.fleet_looks import OFFER, eligible
from tests.fl_server.harness import World


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


@pytest.mark.parametrize("key", ["name", "version", "source"])
async def test_a_task_must_be_the_same_code(world, key):
    """Name, version and source."""
    await Device("a").come(world)
    assert eligible(world, task={**OFFER, key: "other"}) == ()


async def test_labels_choose(world):
    """A run takes clients that have all of its labels; they may have more."""
    await Device("a", labels={"site": "north", "gpu": "yes"}).come(world)
    await Device("b", labels={"site": "south"}).come(world)
    assert eligible(world, labels={"site": "north"}) == ("a",)
    assert eligible(world, labels={"site": "north", "gpu": "no"}) == ()
    assert eligible(world) == ("a", "b")


async def test_availability_is_the_clients_word(world):
    """Who may not train is not drawn, until it says otherwise; a registration says it too."""
    a = await Device("a").come(world)
    busy = pb.Availability(may_train=False, reason=pb.UNAVAILABLE_REASON_DEVICE_BUSY, detail="a game")
    await world.service.ReportStatus(pb.ReportStatusRequest(session_id=a.session, availability=busy), None)
    assert (eligible(world), world.fleet.workforce.availability("a").detail) == ((), "a game")
    await a.come(world)
    assert eligible(world) == ("a",)
    registration = a.registration(availability=busy)
    a.registration = lambda: registration
    await a.come(world)
    assert eligible(world) == ()


async def test_a_client_works_for_one_run(world):
    """Others may draw it when its run lets it go, and not before."""
    for name in "ab":
        await Device(name).come(world)
    world.fleet.workforce.work_for("r", frozenset("a"))
    assert (eligible(world, "r"), eligible(world, "s"), world.fleet.workforce.run_of("a")) == (("a", "b"), ("b",), "r")
    version = world.fleet.version
    world.fleet.workforce.work_for("r", frozenset("a"))
    assert world.fleet.version == version
    world.fleet.workforce.work_for("r", frozenset())
    assert (eligible(world, "s"), world.fleet.workforce.run_of("a")) == (("a", "b"), "")
