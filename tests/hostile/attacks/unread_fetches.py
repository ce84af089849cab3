"""Hundreds of FetchModel streams over several connections from which nothing is ever read."""

from __future__ import annotations

import asyncio
from typing import Any

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc
from tests.hostile.assigned import assigned, channels
from tests.hostile.target import Target, Until

CONNECTIONS, STREAMS = 10, 300
PAUSE_S = 0.5


def attack(target: Target, until: Until) -> None:
    """Keep as many open as the coordinator lets stand; of the largest resource that the attacker was assigned."""
    with assigned(target, until) as (client, work):
        sizes = {resource.size_bytes: resource.digest for resource in work.resources}
        request = pb.FetchModelRequest(session_id=client.session_id, digest=sizes[max(sizes)])
        asyncio.run(_attack(target, request, until))


async def _attack(target: Target, request: pb.FetchModelRequest, until: Until) -> None:
    connections = channels(target, CONNECTIONS)
    stubs: list[Any] = [coordinator_pb2_grpc.CoordinatorStub(channel) for channel in connections]
    streams: list[Any] = []
    while not until():
        streams = [stream for stream in streams if not stream.done()]
        streams += [stubs[number % CONNECTIONS].FetchModel(request) for number in range(STREAMS - len(streams))]
        await asyncio.sleep(PAUSE_S)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*(stream.code() for stream in streams))
    for channel in connections:
        await channel.close()
