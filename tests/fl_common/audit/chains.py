"""Chains of rows for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fl_common.audit import START, AuditRow, Head


def a_row(number: int, subject: str = "edge-3") -> AuditRow:
    """A row without a hash."""
    return AuditRow(number, 10**15 + number, "operator:alice", "192.0.2.7:5000", "BanClient", subject, "ok", "lost")


def linked(rows: Sequence[AuditRow], after: Head = START) -> list[AuditRow]:
    """The rows with their hashes."""
    done = []
    for row in rows:
        done.append(replace(row, hash=row.linked(after.hash)))
        after = done[-1].head
    return done


def a_chain(length: int) -> list[AuditRow]:
    """A whole chain."""
    return linked([a_row(number) for number in range(1, length + 1)])
