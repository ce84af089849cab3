"""The store behind its thread: in order, to the end, and patient with a full disk."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fl_server import ledger as ledger_module
from fl_server.ledger import Ledger
from fl_server.store.base import StoreError, StoreFull
from fl_server.store.sql import open_sqlite
from tests.fl_server.store.records import a_client, why


def raises(error):
    """A method that only fails."""

    def fail(*_):
        raise error

    return fail


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


async def test_clients_that_come_together_are_written_together(ledger, monkeypatch):
    """In one transaction while the thread is busy, in order; a call between two of them stays between them."""
    groups, put, go_on = [], ledger.store.put_clients, threading.Event()
    monkeypatch.setattr(ledger.store, "put_clients", lambda *group: groups.append(len(group[0])) or put(*group))
    blocked = asyncio.ensure_future(ledger.do(go_on.wait, 20))
    clients = [asyncio.ensure_future(ledger.put_client(a_client(name), why("came", name))) for name in "abc"]
    await asyncio.sleep(0)
    forgotten = asyncio.ensure_future(ledger.do(ledger.store.forget_client, "b", why("forgotten", "b")))
    again = asyncio.ensure_future(ledger.put_client(a_client("b", note="again"), None))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(blocked, *clients, forgotten, again)
    assert groups == [3, 1]
    assert [(client.client_id, client.note) for client in ledger.store.clients()][1] == ("b", "again")
    assert [entry.event for entry in ledger.store.history()] == ["came"] * 3 + ["forgotten"]


async def test_clients_that_come_soon_after_another_are_gathered(ledger, monkeypatch):
    """The first one goes alone; what comes then goes together, at the latest before a call."""
    groups, put = [], ledger.store.put_clients
    monkeypatch.setattr(ledger.store, "put_clients", lambda *group: groups.append(len(group[0])) or put(*group))
    monkeypatch.setattr(ledger_module, "GATHER_S", 3600.0)
    await ledger.put_client(a_client("a"), None)
    gathered = [asyncio.ensure_future(ledger.put_client(a_client(name), None)) for name in "bcd"]
    await asyncio.sleep(0)
    assert [client.client_id for client in await ledger.do(ledger.store.clients)] == list("abcd")
    await asyncio.gather(*gathered)
    assert groups == [1, 3]


async def test_what_is_gathered_is_written_before_the_end(monkeypatch, tmp_path):
    """A client that came last is there at the next start."""
    monkeypatch.setattr(ledger_module, "GATHER_S", 3600.0)
    ledger = Ledger(open_sqlite(tmp_path / "ledger.sqlite"))
    await ledger.put_client(a_client("a"), None)
    last = asyncio.ensure_future(ledger.put_client(a_client("b"), None))
    await asyncio.sleep(0)
    ledger.close()
    await last
    later = open_sqlite(tmp_path / "ledger.sqlite")
    assert [client.client_id for client in later.clients()] == ["a", "b"]
    later.close()


async def test_what_is_gathered_is_written_in_time(ledger, monkeypatch):
    """Nobody else has to come."""
    monkeypatch.setattr(ledger_module, "GATHER_S", 0.01)
    for name in "ab":
        await ledger.put_client(a_client(name), None)
    assert [client.client_id for client in ledger.store.clients()] == ["a", "b"]


async def test_clients_that_cannot_be_written_all_hear_of_it(ledger, monkeypatch):
    """The next ones are tried anew."""
    with monkeypatch.context() as patch:
        patch.setattr(ledger.store, "put_clients", raises(StoreFull("no room")))
        outcomes = await asyncio.gather(
            *(ledger.put_client(a_client(name), None) for name in "ab"), return_exceptions=True
        )
    assert [str(outcome) for outcome in outcomes] == ["no room"] * 2
    await ledger.put_client(a_client("a"), None)
    assert [client.client_id for client in ledger.store.clients()] == ["a"]


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
