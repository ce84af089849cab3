"""Downloads of models: encoded once, from any offset, and only during their round."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fl_server.aggregation.outgoing import RECENT, Broadcast
from fl_server.errors import Forbidden, InvalidInput, NoSuchResource, UnknownSessionError
from fl_server.run.run import Run
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import TASK, World, until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def test_a_fetch_resumes_at_an_offset(tmp_path: Path) -> None:
    """At the chunk border at or below it. At the full size only the header is sent; a larger offset is refused."""
    async with World(tmp_path, chunk_bytes=1 << 16) as world:
        a = await Device("a", options={"model": "frozen"}, works=False).connect(world)
        await world.create(round={"clients_per_round": 1}, task={"name": TASK, "options": {"model": "frozen"}})
        frozen = (await a.assigned()).resources[-1]

        async def fetched(offset: int) -> list[int]:
            request = pb.FetchModelRequest(session_id=a.session, digest=frozen.digest, offset=offset)
            parts = [
                pb.FetchModelResponse.FromString(each) async for each in world.service.FetchModel(request, NO_CONTEXT)
            ]
            return [part.chunk.offset for part in parts[1:]]

        assert await fetched((5 << 16) + 17) == list(range(5 << 16, frozen.size_bytes, 1 << 16))
        assert await fetched(frozen.size_bytes) == []
        with pytest.raises(InvalidInput, match=f"offset: expected at most the size, {frozen.size_bytes}"):
            await fetched(frozen.size_bytes + 1)


async def test_all_fetches_get_the_same_messages(world: World) -> None:
    """Header and chunks are encoded once for clients that fetch at about the same time."""
    a = await Device("a", works=False).connect(world)
    await world.create(round={"clients_per_round": 1})
    request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[0].digest)
    one, other = [[part async for part in world.service.FetchModel(request, NO_CONTEXT)] for _ in range(2)]
    assert len(one) == 2
    assert one == other
    assert (one[0] is other[0], one[1] is other[1]) == (True, True)


async def test_few_encoded_chunks_are_kept(tmp_path: Path) -> None:
    """All chunks would be a second model in memory."""
    async with World(tmp_path, chunk_bytes=1 << 16) as world:
        a = await Device("a", options={"model": "frozen"}, works=False).connect(world)
        await world.create(round={"clients_per_round": 1}, task={"name": TASK, "options": {"model": "frozen"}})
        request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[-1].digest)
        one, other = [[part async for part in world.service.FetchModel(request, NO_CONTEXT)] for _ in range(2)]
        assert one == other
        assert len(one) > RECENT + 1
        assert one[1] is not other[1]


async def test_a_slow_reader_does_not_keep_an_earlier_model_in_memory(world: World) -> None:
    """Its round ends after it read the header: the round's model is released, and the fetch ends with an error."""
    a = await Device("a", works=False).connect(world)
    run = await world.create(round={"clients_per_round": 1})
    request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[0].digest)
    reading = aiter(world.service.FetchModel(request, NO_CONTEXT))
    await anext(reading)
    model = weakref.ref(run.model.broadcasts[0])
    await a.contribute(world, await a.assigned())
    await a.assigned(round_=1)

    def released() -> bool:
        gc.collect()
        return model() is None

    # A push that still waits for an idle event loop holds its round's model for that long.
    await until(released, "the earlier model is released")
    with pytest.raises(NoSuchResource):
        await anext(reading)


async def test_a_resource_is_looked_up_once_for_a_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of its chunks: the search goes through all runs."""
    async with World(tmp_path, chunk_bytes=1 << 16) as world:
        a = await Device("a", options={"model": "frozen"}, works=False).connect(world)
        await world.create(round={"clients_per_round": 1}, task={"name": TASK, "options": {"model": "frozen"}})
        frozen = (await a.assigned()).resources[-1]
        found, look_up = [], world.coordinator.resource

        def counted(digest: bytes, *others: str) -> tuple[Run | None, Broadcast]:
            found.append(digest)
            return look_up(digest, *others)

        monkeypatch.setattr(world.coordinator, "resource", counted)
        request = pb.FetchModelRequest(session_id=a.session, digest=frozen.digest)
        messages = [each async for each in world.service.FetchModel(request, NO_CONTEXT)]
        assert len(messages) > 5
        assert found == [frozen.digest.value]


async def test_the_fetch_of_a_fenced_session_ends(world: World) -> None:
    """At the next message: a newer session of the client has taken its place."""
    a = await Device("a", works=False).connect(world)
    await world.create(round={"clients_per_round": 1})
    request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[0].digest)
    reading = aiter(world.service.FetchModel(request, NO_CONTEXT))
    await anext(reading)
    await Device("a", works=False).connect(world)
    with pytest.raises(UnknownSessionError):
        await anext(reading)


async def test_the_fetch_from_an_ended_run_ends(world: World) -> None:
    """At the next message: the run's models are released."""
    a = await Device("a", works=False).connect(world)
    run = await world.create(round={"clients_per_round": 1})
    request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[0].digest)
    reading = aiter(world.service.FetchModel(request, NO_CONTEXT))
    await anext(reading)
    await world.coordinator.actions.stop(run, "enough", "admin")
    with pytest.raises(NoSuchResource):
        await anext(reading)


async def test_a_banned_clients_fetch_ends(world: World) -> None:
    """At the next message of the transfer."""
    a = await Device("a", works=False).connect(world)
    await world.create(round={"clients_per_round": 1})
    request = pb.FetchModelRequest(session_id=a.session, digest=(await a.assigned()).resources[0].digest)
    reading = aiter(world.service.FetchModel(request, NO_CONTEXT))
    await anext(reading)
    await world.operators.ban("a", "it fetches too much", "admin")
    with pytest.raises(Forbidden, match="banned: it fetches too much"):
        await anext(reading)


@pytest.mark.parametrize("is_named", [True, False])
async def test_a_fetch_counts_for_the_run_of_the_assignment(world: World, is_named: bool) -> None:
    """Of two runs with one first model, that with the assignment has the bytes and shows the transfer.

    A client that names no run works for that run.
    """
    a = await Device("a", works=False).connect(world)
    waits = await world.create(name="waits", round={"clients_per_round": 2})
    goes = await world.create(name="goes", round={"clients_per_round": 1})
    assignment = await a.assigned()
    assert waits.model.broadcasts[0].digest == goes.model.broadcasts[0].digest
    run_id = assignment.key.run_id if is_named else ""
    request = pb.FetchModelRequest(session_id=a.session, digest=assignment.resources[0].digest, run_id=run_id)
    reading = aiter(world.service.FetchModel(request, NO_CONTEXT))
    await anext(reading)
    assert ["a" in run.rounds.transfers.newest for run in (waits, goes)] == [False, True]
    received = [part async for part in reading]
    assert len(received) == 1
    assert (waits.rounds.bytes.down, goes.rounds.bytes.down) == (0, assignment.resources[0].size_bytes)
