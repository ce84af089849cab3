"""One entry of the audit log, before it has a number and a hash."""

from __future__ import annotations

from dataclasses import dataclass


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
