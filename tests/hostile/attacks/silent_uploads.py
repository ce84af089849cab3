"""Thousands of SubmitUpdate streams over several connections on which nothing is ever sent."""

from __future__ import annotations

import asyncio
from typing import Any

from protos.fl.v1 import coordinator_pb2_grpc
from tests.hostile.assigned import channels
from tests.hostile.target import Target, Until

CONNECTIONS, STREAMS, A_SECOND = 10, 3_000, 100
PAUSE_S = 1.0


def attack(target: Target, until: Until) -> None:
    """Open them all at once; open ended and refused ones again, some a second."""
    asyncio.run(_attack(target, until))


async def _attack(target: Target, until: Until) -> None:
    connections = channels(target, CONNECTIONS)
    stubs: list[Any] = [coordinator_pb2_grpc.CoordinatorStub(channel) for channel in connections]
    streams: list[Any] = [stubs[number % CONNECTIONS].SubmitUpdate() for number in range(STREAMS)]
    while not until():
        await asyncio.sleep(PAUSE_S)
        streams = [stream for stream in streams if not stream.done()]
        missing = min(A_SECOND, STREAMS - len(streams))
        streams += [stubs[number % CONNECTIONS].SubmitUpdate() for number in range(missing)]
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*(stream.code() for stream in streams))
    for channel in connections:
        await channel.close()
