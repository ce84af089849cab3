"""What goes down to clients: encoded once, from any offset, and for no longer than its round lasts."""

from __future__ import annotations

import gc

import pytest

from fl_server.broadcast import Broadcast
from fl_server.errors import Forbidden, InvalidInput, NoSuchResource
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.harness import TASK, World


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def test_a_fetch_goes_on_from_an_offset(tmp_path):
    """From the chunk border at or below it; a whole one gets the header alone, and more than the size is refused."""
    async with World(tmp_path, chunk_bytes=1 << 16) as world:
        a = await Device("a", options={"model": "frozen"}, works=False).come(world)
        await world.create(round={"clients_per_round": 1}, task={"name": TASK, "options": {"model": "frozen"}})
        frozen = (await a.assigned()).resources[-1]

        async def fetched(offset):
            request = pb.FetchModelRequest(session_id=a.session, digest=frozen.digest, offset=offset)
            parts = [pb.FetchModelResponse.FromString(each) async for each in world.service.FetchModel(request, None)]
            return [part.chunk.offset for part in parts[1:]]

        assert await fetched((5 << 16) + 17) == list(range(5 << 16, frozen.size_bytes, 1 << 16))
        assert await fetched(frozen.size_bytes) == []
        with pytest.raises(InvalidInput, match=f"offset: expected at most the size, {frozen.size_bytes}"):
            await fetched(frozen.size_bytes + 1)


async def test_fetches_get_the_same_messages(world):
    """The header is encoded once; chunks are encoded when they are sent, out of one memory, and say the same."""
    a = await Device("a", works=False).come(world)
    await world.create(round={"clients_per_round": 1})
    request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[0].digest)
    one, other = [[part async for part in world.service.FetchModel(request, None)] for _ in range(2)]
    assert len(one) == 2
    assert one == other
    assert one[0] is other[0]


async def test_a_slow_reader_keeps_no_model_of_an_earlier_round(world):
    """It has read the header when its round ends: of that round's model nothing is held for it, and it is told so."""
    a = await Device("a", works=False).come(world)
    run = await world.create(round={"clients_per_round": 1})
    request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[0].digest)
    reading = aiter(world.service.FetchModel(request, None))
    await anext(reading)
    model = run.model.broadcasts[0].digest
    await a.contribute(world, await a.assigned())
    await a.assigned(round_=1)
    gc.collect()
    assert not [held for held in gc.get_objects() if type(held) is Broadcast and held.digest == model]
    with pytest.raises(NoSuchResource):
        await anext(reading)


async def test_a_banned_clients_fetch_ends(world):
    """At the next message, in mid-transfer."""
    a = await Device("a", works=False).come(world)
    await world.create(round={"clients_per_round": 1})
    request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[0].digest)
    reading = aiter(world.service.FetchModel(request, None))
    await anext(reading)
    await world.operators.ban("a", "it fetches too much", "admin")
    with pytest.raises(Forbidden, match="banned: it fetches too much"):
        await anext(reading)
