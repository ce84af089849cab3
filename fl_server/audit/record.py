"""One entry of the audit log, before it has a number and a hash; and what the other parts of the coordinator call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """Who did what, from where, to what, with which result. Secrets are never part of it."""

    actor: str
    """"operator:alice", "client:edge-3", "anybody"."""
    address: str
    """host:port of the caller; "" if there was none."""
    method: str
    """The called method, or what happened: "BanClient", "Enroll", "identity_refused"."""
    subject: str
    """The run, client, token or certificate concerned; may be empty."""
    result: str
    """"ok", or the status code in lower case: "permission_denied"; "asked" for the row before a change."""
    detail: str = ""
    """The reason given, or the refusal."""


class Auditor(Protocol):
    """Writes audit records. Lives on the event loop."""

    async def start(self) -> None:
        """Check the end of the log, before the first row. Raises StoreError."""

    async def record(self, record: AuditRecord) -> None:
        """Add a row. Returns when it is durable; waits while the ledger cannot be written."""

    async def record_now(self, record: AuditRecord) -> int:
        """Add a row before a change, and return its number when it is durable.

        Raises StoreError if it cannot be written: then the change must not be made.
        """

    def record_later(self, record: AuditRecord) -> None:
        """Add a row without waiting."""

    def record_read(self, record: AuditRecord) -> None:
        """Add a row for a call that changes nothing, without waiting. Repeats within a minute are one row."""

    def record_refusal(self, record: AuditRecord) -> None:
        """Add a row for something that a stranger can cause, without waiting; limited by address and minute."""
