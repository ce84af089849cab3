"""The part of the ledger's interface for the audit log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from fl_common.audit import AuditRow, Head

SCANNED = 5000
"""Rows that one call looks at: other calls of the ledger need their turn."""


class AuditPage(NamedTuple):
    """Some rows, and where to continue."""

    rows: list[AuditRow]
    next: int
    """Number from which on rows were not looked at."""


class AuditRows(Protocol):
    """Rows are added at the end of the chain, and never changed or removed."""

    def add_audit_rows(self, rows: Sequence[AuditRow], after: Head, *, fsynced: bool) -> Head:
        """Add rows, which have numbers and hashes, if `after` is the newest row. Returns the newest row.

        Nothing is added if another row is the newest; the caller compares. The same rows again change nothing.
        """
        ...

    def audit_rows(self, first: int, last: int, limit: int, matching: Mapping[str, str | int]) -> AuditPage:
        """At most `limit` rows with numbers from `first` to `last`, in order; at most SCANNED rows are looked at.

        matching: only rows with these values of actor, method, subject or result; "since_us": not before this time.
        """
        ...

    def newest_audit_rows(self, count: int) -> list[AuditRow]:
        """The newest rows, in order of number."""
        ...
