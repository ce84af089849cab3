"""Health: checks and watches of known services; unknown names are not stored."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from fl_server.errors import NoSuchService
from fl_server.rpc.health import Probes
from tests.fl_server.harness import TIMEOUT_S

STATUS = health_pb2.HealthCheckResponse


def asked(name: str) -> health_pb2.HealthCheckRequest:
    """A request about a service."""
    return health_pb2.HealthCheckRequest(service=name)


async def test_a_service_starts_as_not_serving() -> None:
    """Each known service is listed."""
    probes = Probes(("live", ""))
    probes.set("live", STATUS.SERVING)
    answers = [(await probes.Check(asked(name), None)).status for name in ("live", "")]
    assert answers == [STATUS.SERVING, STATUS.NOT_SERVING]
    listed = await probes.List(health_pb2.HealthListRequest(), None)
    assert {name: found.status for name, found in listed.statuses.items()} == {
        "live": STATUS.SERVING,
        "": STATUS.NOT_SERVING,
    }


async def test_a_watch_gets_each_change() -> None:
    """Each change once, without those of other services."""
    probes = Probes(("a", "b"))
    watch: Any = probes.Watch(asked("a"), None)
    assert (await anext(watch)).status == STATUS.NOT_SERVING
    next_status = asyncio.create_task(anext(watch))
    for name in ("b", "a"):
        await asyncio.sleep(0)
        probes.set(name, STATUS.SERVING)
    assert (await next_status).status == STATUS.SERVING
    await watch.aclose()


async def test_an_unknown_service_is_not_kept() -> None:
    """A check is refused with a shortened name; a watch returns SERVICE_UNKNOWN and ends."""
    probes = Probes(("a",))
    with pytest.raises(NoSuchService, match="service: expected one of 'a', got 'xxx") as caught:
        await probes.Check(asked("x" * 1000), None)
    assert len(str(caught.value)) < 200
    answers = [answer.status async for answer in probes.Watch(asked("x"), None)]
    assert answers == [STATUS.SERVICE_UNKNOWN]
    assert set(probes._states) == {"a"}


async def test_the_library_keeps_what_strangers_watch() -> None:
    """Its Watch of an unknown service never ends and keeps the name, so ours stays; without this, it could go."""
    library, name = HealthServicer(), "x" * 1000
    watching = asyncio.create_task(library.Watch(asked(name), AsyncMock()))
    async with asyncio.timeout(TIMEOUT_S):
        while not library._server_watchers:
            await asyncio.sleep(0)
    assert list(library._server_watchers) == [name]
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
