"""The ledger's thread: calls in order, no lost writes, and retries on a full disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fl_server.store import ledger as ledger_module
from fl_server.store.database.store import open_sqlite
from fl_server.store.errors import StoreError, StoreFull
from fl_server.store.ledger import Ledger, write_when_possible
from fl_server.store.records import ClientRecord, HistoryRecord
from tests.fl_server.store.records import a_client, why


def raises(error: Exception) -> Callable[..., None]:
    """A function that raises this error."""

    def fail(*_: object) -> None:
        raise error

    return fail


def record_groups(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> list[int]:
    """From now on, the number of clients in each write."""
    groups: list[int] = []
    put_clients = ledger.store.put_clients

    def record(clients: Sequence[ClientRecord], whys: Sequence[HistoryRecord] = ()) -> None:
        groups.append(len(clients))
        put_clients(clients, whys)

    monkeypatch.setattr(ledger.store, "put_clients", record)
    return groups


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger in memory."""
    ledger = Ledger(open_sqlite(":memory:"))
    yield ledger
    ledger.close()


async def test_calls_are_made_in_order_in_one_thread(ledger: Ledger) -> None:
    """The thread is not that of the event loop."""
    await asyncio.gather(*(ledger.do(ledger.store.add_history, why(str(number))) for number in range(20)))
    entries = await ledger.do(ledger.store.history)
    assert [entry.event for entry in entries] == [str(number) for number in range(20)]
    threads = {await ledger.do(threading.get_ident) for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_a_write_completes_although_its_caller_is_cancelled(ledger: Ledger) -> None:
    """A broken stream undoes no write."""
    proceed = threading.Event()
    blocked = asyncio.ensure_future(ledger.do(proceed.wait, 20))
    writing = asyncio.ensure_future(ledger.do(ledger.store.add_history, why("kept")))
    await asyncio.sleep(0)
    writing.cancel()
    proceed.set()
    await blocked
    assert [entry.event for entry in await ledger.do(ledger.store.history)] == ["kept"]


async def test_simultaneous_registrations_are_written_together(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """They form one transaction while the thread is busy. The order of registrations and other calls is kept."""
    groups, proceed = record_groups(monkeypatch, ledger), threading.Event()
    blocked = asyncio.ensure_future(ledger.do(proceed.wait, 20))
    clients = [asyncio.ensure_future(ledger.put_client(a_client(name), why("came", name))) for name in "abc"]
    await asyncio.sleep(0)
    forgotten = asyncio.ensure_future(ledger.do(ledger.store.forget_client, "b", why("forgotten", "b")))
    again = asyncio.ensure_future(ledger.put_client(a_client("b", note="again"), None))
    await asyncio.sleep(0)
    proceed.set()
    await asyncio.gather(blocked, *clients, forgotten, again)
    assert groups == [3, 1]
    assert [(client.client_id, client.note) for client in ledger.store.clients()][1] == ("b", "again")
    assert [entry.event for entry in ledger.store.history()] == ["came"] * 3 + ["forgotten"]


async def test_registrations_soon_after_another_are_gathered(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is written at once. The next ones are written together, at the latest before another call."""
    groups = record_groups(monkeypatch, ledger)
    monkeypatch.setattr(ledger_module, "GATHER_S", 3600.0)
    await ledger.put_client(a_client("a"), None)
    gathered = [asyncio.ensure_future(ledger.put_client(a_client(name), None)) for name in "bcd"]
    await asyncio.sleep(0)
    assert [client.client_id for client in await ledger.do(ledger.store.clients)] == list("abcd")
    await asyncio.gather(*gathered)
    assert groups == [1, 3]


async def test_gathered_registrations_are_written_before_the_ledger_closes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last client is in the ledger at the next start."""
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


async def test_gathered_registrations_are_written_in_time(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait for another registration."""
    monkeypatch.setattr(ledger_module, "GATHER_S", 0.01)
    for name in "ab":
        await ledger.put_client(a_client(name), None)
    assert [client.client_id for client in ledger.store.clients()] == ["a", "b"]


async def test_all_gathered_registrations_get_a_write_error(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later registrations are written."""
    with monkeypatch.context() as patch:
        patch.setattr(ledger.store, "put_clients", raises(StoreFull("no room")))
        outcomes = await asyncio.gather(
            *(ledger.put_client(a_client(name), None) for name in "ab"), return_exceptions=True
        )
    assert [str(outcome) for outcome in outcomes] == ["no room"] * 2
    await ledger.put_client(a_client("a"), None)
    assert [client.client_id for client in ledger.store.clients()] == ["a"]


async def test_a_write_is_retried_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it succeeds. Each failure and the end of the failures are reported; the result is that of the last try."""
    monkeypatch.setattr(ledger_module, "RETRY_S", 0.0)
    reports: list[str] = []
    failures = iter([StoreFull("one"), StoreFull("two")])

    async def write() -> str:
        if failure := next(failures, None):
            raise failure
        return "written"

    assert await write_when_possible(reports.append, write) == "written"
    assert reports == ["one", "two", ""]


async def test_other_errors_are_not_retried() -> None:
    """A retry would fail in the same way."""

    async def fail() -> None:
        raise StoreError("torn")

    with pytest.raises(StoreError, match="torn"):
        await write_when_possible(lambda _: pytest.fail("the disk is not full"), fail)
