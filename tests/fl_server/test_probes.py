"""Health: states of known services, told and watched; nothing is kept of other names."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2

from fl_server.errors import NoSuchService
from fl_server.rpc.probes import Probes

STATUS = health_pb2.HealthCheckResponse


def asked(name):
    """A request about a service."""
    return health_pb2.HealthCheckRequest(service=name)


async def test_a_service_is_not_serving_before_it_is_said_to():
    """And each of the known ones is listed."""
    probes = Probes(("live", ""))
    probes.set("live", STATUS.SERVING)
    answers = [(await probes.Check(asked(name), None)).status for name in ("live", "")]
    assert answers == [STATUS.SERVING, STATUS.NOT_SERVING]
    listed = await probes.List(health_pb2.HealthListRequest(), None)
    assert {name: found.status for name, found in listed.statuses.items()} == {
        "live": STATUS.SERVING,
        "": STATUS.NOT_SERVING,
    }


async def test_a_watch_is_told_of_each_change():
    """Once for each, and not of other services' changes."""
    probes = Probes(("a", "b"))
    watch = probes.Watch(asked("a"), None)
    assert (await anext(watch)).status == STATUS.NOT_SERVING
    coming = asyncio.create_task(anext(watch))
    for name in ("b", "a"):
        await asyncio.sleep(0)
        probes.set(name, STATUS.SERVING)
    assert (await coming).status == STATUS.SERVING
    await watch.aclose()


async def test_an_unknown_service_is_not_kept():
    """A check is refused in words that show little of a long name; a watch says so and ends."""
    probes = Probes(("a",))
    with pytest.raises(NoSuchService, match="service: expected one of 'a', got 'xxx") as caught:
        await probes.Check(asked("x" * 1000), None)
    assert len(str(caught.value)) < 200
    answers = [answer.status async for answer in probes.Watch(asked("x"), None)]
    assert answers == [STATUS.SERVICE_UNKNOWN]
    assert set(probes._states) == {"a"}
