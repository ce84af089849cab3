"""`WatchHistory` on a real port: older entries first, then each new one, once; owners; one read for all watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_server.identity import Identity
from fl_server.rpc.admin import AdminService
from fl_server.store import ledger
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.harness import TIMEOUT_S, World, run_config, until
from tests.fl_server.rpc.test_owners import calling_as, spec
from tests.fl_server.store.records import why

ALICE, BOB, VERA = Identity("operator", "alice"), Identity("operator", "bob"), Identity("viewer", "vera")
CONTEXT: Any = None


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator with an empty history."""
    async with World(tmp_path) as world:
        yield world


@pytest.fixture
async def stub(world: World) -> AsyncIterator[Any]:
    """The Admin service on a real port."""
    async with admin_channel(world) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


async def add(world: World, *events: str, subject: str = "s") -> None:
    """Write entries as the coordinator does: in the ledger's thread."""
    ledger = world.services.ledger
    for event in events:
        await ledger.do(ledger.store.add_history, why(event, subject))


async def read(stream: Any, count: int) -> list[pb.HistoryEntry]:
    """The next entries of a stream."""
    found: list[pb.HistoryEntry] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(found) < count:
            found += (await stream.read()).entries
    return found


async def test_older_entries_then_new_ones(world: World, stub: Any) -> None:
    """From a number on, each entry once and in order, with the numbers of the list."""
    await add(world, "a", "b", "c")
    listed = (await stub.ListHistory(pb.ListHistoryRequest())).entries
    assert [entry.number for entry in listed] == sorted({entry.number for entry in listed} - {0})
    stream = stub.WatchHistory(pb.WatchHistoryRequest(after_number=listed[0].number))
    assert await read(stream, 2) == list(listed[1:])
    await add(world, "d")
    await add(world, "e")
    newer = await read(stream, 2)
    assert [entry.event for entry in newer] == ["d", "e"]
    assert list((await stub.ListHistory(pb.ListHistoryRequest(limit=2))).entries) == newer


async def test_from_now_on_and_from_beyond_the_end(world: World, stub: Any) -> None:
    """The first response comes at once; a number that is not there yet counts as the newest."""
    await add(world, "a", "b")
    newest = (await stub.ListHistory(pb.ListHistoryRequest(limit=1))).entries[0].number
    for request in (pb.WatchHistoryRequest(), pb.WatchHistoryRequest(after_number=2**62)):
        stream = stub.WatchHistory(request)
        assert await stream.read() == pb.WatchHistoryResponse(last_number=newest)
        await add(world, "next")
        (entry,) = await read(stream, 1)
        assert (entry.event, entry.number) == ("next", newest + 1)
        newest = entry.number
        stream.cancel()


async def test_only_one_subject(world: World, stub: Any) -> None:
    """Entries about others are left out, of the past and of the present."""
    await add(world, "other", subject="t")
    await add(world, "mine")
    stream = stub.WatchHistory(pb.WatchHistoryRequest(after_number=0, subject="s"))
    assert [entry.event for entry in await read(stream, 1)] == ["mine"]
    await add(world, "other", subject="t")
    await add(world, "mine too")
    assert [entry.event for entry in await read(stream, 1)] == ["mine too"]


async def test_a_watcher_far_behind_gets_all(world: World, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More entries than are in memory, before and while it watches, in several reads: each once."""
    monkeypatch.setattr(ledger, "TAIL", 5)
    monkeypatch.setattr(ledger, "AT_ONCE", 3)
    await add(world, *map(str, range(20)))
    stream = stub.WatchHistory(pb.WatchHistoryRequest(after_number=0))
    first = await stream.read()
    await add(world, *map(str, range(20, 40)))
    found = [*first.entries, *await read(stream, 40 - len(first.entries))]
    assert [entry.event for entry in found] == [str(number) for number in range(40)]


async def test_many_watchers_cost_one_read(world: World, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty streams get a new entry from one read of the ledger; without a watcher nothing is read."""
    streams = [stub.WatchHistory(pb.WatchHistoryRequest()) for _ in range(30)]
    for stream in streams:
        await stream.read()
    reads, store = list[object](), world.store
    between = store.history_between

    def counted(*args: Any) -> Any:
        reads.append(args)
        return between(*args)

    monkeypatch.setattr(store, "history_between", counted)
    await add(world, "new")
    assert [[entry.event for entry in await read(stream, 1)] for stream in streams] == [["new"]] * 30
    assert len(reads) == 1
    for stream in streams:
        stream.cancel()
    feed = world.services.ledger.history
    await until(lambda: not feed.watchers, "all streams are closed")
    await add(world, "unseen")
    assert len(reads) == 1


async def test_entries_that_the_caller_may_not_see(world: World) -> None:
    """Alice's run is not in Bob's stream, from its first entry on; a viewer sees it. The last number moves on."""
    admin = AdminService(world.services, world.coordinator)

    async def watching(who: Identity) -> list[str]:
        with calling_as(who):
            found: list[str] = []
            async with asyncio.timeout(TIMEOUT_S):
                async for response in admin.WatchHistory(pb.WatchHistoryRequest(), CONTEXT):
                    found += [entry.subject for entry in response.entries if entry.event == "run_created"]
                    if "bobs" in found:
                        break
            return found

    bob, vera = asyncio.create_task(watching(BOB)), asyncio.create_task(watching(VERA))
    feed = world.services.ledger.history
    await until(lambda: feed.watchers == 2, "both watch")
    for who, name in ((ALICE, "alices"), (BOB, "bobs")):
        with calling_as(who):
            await admin.CreateRun(pb.CreateRunRequest(spec=spec(name)), CONTEXT)
    assert (await bob, await vera) == (["bobs"], ["alices", "bobs"])
    with calling_as(BOB):
        async for response in admin.WatchHistory(pb.WatchHistoryRequest(after_number=0, subject="alices"), CONTEXT):
            assert not response.entries
            break


async def test_it_continues_after_a_restart(tmp_path: Path) -> None:
    """With the last number that it has, at a coordinator that was started again on the same ledger."""
    async with World(tmp_path) as world, admin_channel(world) as channel:
        await add(world, "a", "b")
        first = await admin_pb2_grpc.AdminStub(channel).WatchHistory(pb.WatchHistoryRequest(after_number=0)).read()
    async with World(tmp_path) as world:
        await world.create(**run_config("r", round={"clients_per_round": 9}).model_dump(exclude_none=True))
        async with admin_channel(world) as channel:
            stream = admin_pb2_grpc.AdminStub(channel).WatchHistory(
                pb.WatchHistoryRequest(after_number=first.last_number)
            )
            assert (await read(stream, 1))[0].event == "run_created"


async def test_a_number_below_zero_is_refused(stub: Any) -> None:
    """With the field's name, by both calls."""
    for call, request in (
        (stub.WatchHistory(pb.WatchHistoryRequest(after_number=-1)).read, "after_number: expected"),
        (lambda: stub.ListHistory(pb.ListHistoryRequest(before_number=-5)), "before_number: expected"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=request) as error:
            await call()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_paging_backwards(world: World, stub: Any) -> None:
    """Each list ends where the one after it begins; the oldest names nothing before it."""
    await add(world, *map(str, range(7)))
    before, found = 0, list[str]()
    while True:
        page = await stub.ListHistory(pb.ListHistoryRequest(limit=3, before_number=before))
        found = [entry.event for entry in page.entries] + found
        if not (before := page.first_number):
            break
    assert found == [str(number) for number in range(7)]
