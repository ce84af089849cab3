"""Call QueryUpload repeatedly in many concurrent calls, for a partial upload."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc, training_pb2
from tests.hostile.assigned import assigned, channels, refusals
from tests.hostile.target import Target, Until
from tests.processes.process import TIMEOUT_S
from tests.processes.raw_client import RawClient, messages

CONNECTIONS, AT_ONCE = 4, 200
CHUNK_BYTES = 1 << 16


def attack(target: Target, until: Until) -> None:
    """Send a part of an upload, then query its state until the end."""
    with assigned(target, until) as (client, work):
        request = pb.QueryUploadRequest(session_id=client.session_id, key=work.key)
        request.digest.CopyFrom(_leave_a_part(client, work))
        asyncio.run(_attack(target, request, until))


def _leave_a_part(client: RawClient, work: training_pb2.Assignment) -> Any:
    update = client.update(work)

    def part() -> Iterator[pb.SubmitUpdateRequest]:
        yield from messages(update, CHUNK_BYTES)[:-2]  # neither the last chunk nor the trailer

    with refusals():
        client.stub.SubmitUpdate(part(), timeout=TIMEOUT_S)
    return update.header.digest


async def _attack(target: Target, request: pb.QueryUploadRequest, until: Until) -> None:
    connections = channels(target, CONNECTIONS)

    async def ask(stub: Any) -> None:
        while not until():
            with refusals():
                await stub.QueryUpload(request, timeout=TIMEOUT_S)

    stubs = [coordinator_pb2_grpc.CoordinatorStub(channel) for channel in connections]
    await asyncio.gather(*(ask(stubs[number % CONNECTIONS]) for number in range(AT_ONCE)))
    for channel in connections:
        await channel.close()
