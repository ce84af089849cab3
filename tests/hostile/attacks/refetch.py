"""Fetch the same resource repeatedly on several streams at once."""

from __future__ import annotations

import asyncio
from typing import Any

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc
from tests.hostile.assigned import assigned, channels, refusals
from tests.hostile.target import Target, Until
from tests.processes.process import TIMEOUT_S

AT_ONCE = 3


def attack(target: Target, until: Until) -> None:
    """Fetch all resources of the attacker's assignment."""
    with assigned(target, until) as (client, work):
        requests = [
            pb.FetchModelRequest(session_id=client.session_id, digest=resource.digest) for resource in work.resources
        ]
        asyncio.run(_attack(target, requests, until))


async def _attack(target: Target, requests: list[pb.FetchModelRequest], until: Until) -> None:
    (channel,) = channels(target, 1)
    stub: Any = coordinator_pb2_grpc.CoordinatorStub(channel)

    async def fetch() -> None:
        while not until():
            for request in requests:
                with refusals():
                    async for _ in stub.FetchModel(request, timeout=TIMEOUT_S):
                        pass

    await asyncio.gather(*(fetch() for _ in range(AT_ONCE)))
    await channel.close()
