"""The phases of a round's clients as ListCohort has them, by what went out to each daemon's process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fl_server.rpc.lists import cohort_page
from fl_server.run.run import Run
from protos.fl.v1 import admin_pb2
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def phase(run: Run, client: str = "a") -> str:
    """The phase of a client, which is counted by phase too."""
    page = await cohort_page(run, admin_pb2.ListCohortRequest(run_id=run.id))
    (member,) = [each for each in page.members if each.client_id == client]
    assert page.by_phase[member.phase] >= 1
    return member.phase


async def test_a_client_trains_when_the_last_resource_has_gone_out(world: World) -> None:
    """FedCM sends a model and a momentum: both are needed. The daemon stays the same after a new connection."""
    device = await Device("a", works=False).connect(world)
    run = await world.create(round={"clients_per_round": 1})
    model, momentum = (await device.assigned()).resources
    assert await phase(run) == "assigned"
    await device.fetch(world, model.digest)
    assert await phase(run) == "downloading"
    await device.fetch(world, momentum.digest)
    assert await phase(run) == "training"
    await device.leave()
    await device.connect(world)
    assert await phase(run) == "training"


async def test_another_process_of_a_client_has_nothing(world: World) -> None:
    """A daemon that was started again fetches again."""
    device = await Device("a", works=False).connect(world)
    run = await world.create(round={"clients_per_round": 1})
    for resource in (await device.assigned()).resources:
        await device.fetch(world, resource.digest)
    assert await phase(run) == "training"
    await device.leave()
    await world.service.Register(device.registration(instance_id="another start"), NO_CONTEXT)
    assert await phase(run) == "downloading"


async def test_a_client_that_holds_everything_trains_at_once(world: World) -> None:
    """The first model of a second run equals that of the first: the client fetches nothing."""
    device = await Device("a", works=False).connect(world)
    first = await world.create(round={"clients_per_round": 1})
    for resource in (await device.assigned()).resources:
        await device.fetch(world, resource.digest)
    await world.coordinator.actions.stop(first, "enough", "admin")
    second = await world.create(name="second", round={"clients_per_round": 1})
    await until(lambda: second.state.drawn, "the second run draws it")
    assert await phase(second) == "training"
