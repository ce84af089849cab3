"""The store behind its thread: in order, to the end, and patient with a full disk."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fl_server import ledger as ledger_module
from fl_server.ledger import Ledger
from fl_server.store.base import StoreError, StoreFull
from fl_server.store.sql import open_sqlite
from tests.fl_server.store.records import why


@pytest.fixture
def ledger():
    """A ledger in memory."""
    ledger = Ledger(open_sqlite(":memory:"))
    yield ledger
    ledger.close()


async def test_calls_are_made_in_order_beside_the_loop(ledger):
    """Each in one and the same thread, which is not the loop's."""
    await asyncio.gather(*(ledger.do(ledger.store.add_history, why(str(number))) for number in range(20)))
    entries = await ledger.do(ledger.store.history)
    assert [entry.event for entry in entries] == [str(number) for number in range(20)]
    threads = {await ledger.do(threading.get_ident) for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_what_was_begun_is_done_though_its_caller_is_cancelled(ledger):
    """A cut stream undoes no write."""
    go_on = threading.Event()
    blocked = asyncio.ensure_future(ledger.do(go_on.wait, 20))
    writing = asyncio.ensure_future(ledger.do(ledger.store.add_history, why("kept")))
    await asyncio.sleep(0)
    writing.cancel()
    go_on.set()
    await blocked
    assert [entry.event for entry in await ledger.do(ledger.store.history)] == ["kept"]


async def test_a_full_disk_is_tried_again(ledger, monkeypatch):
    """Until there is room; whoever looks is told each time and when it is over, and the answer is the last try's."""
    monkeypatch.setattr(ledger_module, "NO_ROOM_S", 0.0)
    told, tries = [], iter([StoreFull("one"), StoreFull("two"), "written"])

    def write(word):
        result = next(tries)
        if isinstance(result, Exception):
            raise result
        return f"{word} {result}"

    assert await ledger.insist(told.append, write, "it is") == "it is written"
    assert told == ["one", "two", ""]


async def test_other_errors_are_not_tried_again(ledger):
    """They would be the same the next time."""

    def fail():
        raise StoreError("torn")

    with pytest.raises(StoreError, match="torn"):
        await ledger.insist(lambda _: pytest.fail("it is not full"), fail)
