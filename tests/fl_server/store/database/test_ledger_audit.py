"""The audit log in a ledger, on every backend; and the same ledger edited with SQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import text

from fl_common.audit import START, AuditRow, ChainCheck, Head, Problem
from fl_server.store.database import store
from fl_server.store.database.store import Store
from tests.fl_common.audit.chains import a_chain, a_row, linked
from tests.fl_server.store.conftest import empty_store

__all__ = ["empty_store"]
LEAST, LARGEST = -(2**63), 2**63 - 1


@pytest.fixture
def chain(empty_store: Store) -> list[AuditRow]:
    """Nine rows, which are in the ledger."""
    rows = a_chain(9)
    assert empty_store.add_audit_rows(rows, START, fsynced=True) == rows[-1].head
    return rows


def edit(store: Any, *statements: str) -> None:
    """Change the ledger behind its owner's back."""
    with store._engine.begin() as db:
        for statement in statements:
            db.execute(text(statement))


def stored(store: Store) -> list[AuditRow]:
    """All rows."""
    return store.audit_rows(LEAST, LARGEST, 1000, {}).rows


def found(store: Store, *known: Head) -> list[Problem]:
    """What a check of the ledger finds."""
    check = ChainCheck(known)
    for row in stored(store):
        check.add(row)
    return check.end()


def test_rows_are_read_back(empty_store: Store, chain: list[AuditRow]) -> None:
    """Whole, by number, and the newest."""
    assert stored(empty_store) == chain
    assert empty_store.audit_rows(3, 5, 1000, {}).rows == chain[2:5]
    assert empty_store.newest_audit_rows(2) == chain[-2:]


def test_rows_are_only_added_behind_the_newest(empty_store: Store, chain: list[AuditRow]) -> None:
    """A writer that knows another newest row is given the right one, and adds nothing."""
    more = linked([a_row(10)], chain[-1].head)
    assert empty_store.add_audit_rows(more, chain[7].head, fsynced=False) == chain[-1].head
    assert empty_store.add_audit_rows(more, Head(9, bytes(32)), fsynced=False) == chain[-1].head
    assert stored(empty_store) == chain
    assert empty_store.add_audit_rows(more, chain[-1].head, fsynced=False) == more[-1].head
    assert empty_store.add_audit_rows(more, chain[-1].head, fsynced=False) == more[-1].head
    assert stored(empty_store) == [*chain, *more]


def test_filters_select_rows(empty_store: Store) -> None:
    """By text and by time."""
    rows = linked([a_row(number, f"edge-{number % 2}") for number in range(1, 10)])
    empty_store.add_audit_rows(rows, START, fsynced=False)
    assert empty_store.audit_rows(1, 9, 100, {"subject": "edge-1"}).rows == rows[::2]
    assert empty_store.audit_rows(1, 9, 100, {"since_us": rows[6].time_us}).rows == rows[6:]
    assert empty_store.audit_rows(1, 9, 2, {"subject": "edge-1"}) == ([rows[0], rows[2]], 4)
    assert empty_store.audit_rows(1, 9, 2, {"method": "CreateRun"}) == ([], 10)


def test_one_call_looks_at_a_limited_number_of_rows(
    empty_store: Store, chain: list[AuditRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller continues where it stopped, also over a gap."""
    assert store.SCANNED > 4
    monkeypatch.setattr(store, "SCANNED", 4)
    edit(empty_store, "DELETE FROM audit WHERE number IN (4, 5)")
    assert empty_store.audit_rows(1, 9, 100, {"actor": "nobody"}) == ([], 7)
    assert empty_store.audit_rows(1, 9, 100, {}) == ([*chain[:3], chain[5]], 7)
    assert empty_store.audit_rows(7, 9, 100, {}) == (chain[6:], 10)


def move(row: int, to: int) -> str:
    """Gives a row another number."""
    return f"UPDATE audit SET number = {to} WHERE number = {row}"  # noqa: S608 - numbers of this file


COPY = (
    "INSERT INTO audit SELECT {}, time_us, actor, address, method, 'x', result, detail, hash FROM audit WHERE number=4"
)
EDITS: dict[str, tuple[Sequence[str], int]] = {
    "changed text": (["UPDATE audit SET actor = 'operator:bob' WHERE number = 5"], 5),
    "changed time": (["UPDATE audit SET time_us = time_us + 1 WHERE number = 5"], 5),
    "deleted": (["DELETE FROM audit WHERE number = 5"], 5),
    "first deleted": (["DELETE FROM audit WHERE number = 1"], 1),
    "deleted and renumbered": (
        ["DELETE FROM audit WHERE number = 5", *(move(number, number - 1) for number in (6, 7, 8, 9))],
        5,
    ),
    "inserted": ([*(move(number, number + 1) for number in (9, 8, 7, 6, 5)), COPY.format(5)], 5),
    "inserted before the first": ([COPY.format(-3)], -3),
    "exchanged": ([move(5, 99), move(6, 5), move(99, 6)], 5),
}


@pytest.mark.parametrize(("statements", "row"), EDITS.values(), ids=EDITS)
@pytest.mark.usefixtures("chain")
def test_an_edited_ledger_is_named_at_the_row(empty_store: Store, statements: Sequence[str], row: int) -> None:
    """Whatever SQL can do to it."""
    assert found(empty_store) == []
    edit(empty_store, *statements)
    assert found(empty_store)[0].number == row


def test_a_ledger_without_its_newest_rows_is_found_with_a_head(empty_store: Store, chain: list[AuditRow]) -> None:
    """Which an earlier check has printed."""
    edit(empty_store, "DELETE FROM audit WHERE number > 6")
    assert found(empty_store) == []
    assert found(empty_store, chain[8].head)[0].number == 7
