"""Calls of FetchModel that read nothing and go on sending behind their request, which nobody reads either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from protos.fl.v1 import coordinator_pb2 as pb
from tests.hostile.assigned import assigned, channels
from tests.hostile.target import Target, Until

CONNECTIONS, STREAMS = 2, 4
PAUSE_S = 0.5
PIECE = bytes(64 << 10)


def attack(target: Target, until: Until) -> None:
    """Keep as many open as the coordinator lets stand; of the largest resource that the attacker was assigned."""
    with assigned(target, until) as (client, work):
        sizes = {resource.size_bytes: resource.digest for resource in work.resources}
        request = pb.FetchModelRequest(session_id=client.session_id, digest=sizes[max(sizes)])
        asyncio.run(_attack(target, request.SerializeToString(), until))


async def _attack(target: Target, request: bytes, until: Until) -> None:
    connections = channels(target, CONNECTIONS)
    # On the wire a stream of requests looks like one request until the second message comes.
    methods: list[Any] = [channel.stream_stream("/fl.v1.Coordinator/FetchModel") for channel in connections]
    calls: list[Any] = []
    while not until():
        calls = [call for call in calls if not call.done()]
        calls += [methods[number % CONNECTIONS](_without_end(request)) for number in range(STREAMS - len(calls))]
        await asyncio.sleep(PAUSE_S)
    for call in calls:
        call.cancel()
    await asyncio.gather(*(call.code() for call in calls))
    for channel in connections:
        await channel.close()


async def _without_end(request: bytes) -> AsyncIterator[bytes]:
    yield request
    while True:
        yield PIECE
