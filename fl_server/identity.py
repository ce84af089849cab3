"""Who is calling: the name and role that a certificate states, kept for the length of a call.

A certificate names its holder by a URI in its subject alternative name: fl://client/edge-3, fl://admin/alice. Without TLS there
is no identity, and a caller is who it says it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from fl_server.errors import Forbidden

_SCHEME = "fl://"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a verified certificate says."""

    role: str
    """"client", "admin" or "server"."""
    name: str

    def __str__(self) -> str:
        return f"{self.role}:{self.name}"


ANYBODY = Identity("anybody", "")
"""Of a call over a connection without certificates, where that was allowed by name."""

caller: ContextVar[Identity] = ContextVar("caller", default=ANYBODY)
"""The identity behind the call that is being served."""


def from_names(names: Iterable[bytes]) -> Identity | None:
    """The identity among a certificate's alternative names; None if there is none."""
    for raw in names:
        name = raw.decode("utf-8", "replace")
        if name.startswith(_SCHEME) and name.count("/") == 3:
            role, _, holder = name.removeprefix(_SCHEME).partition("/")
            return Identity(role, holder)
    return None


def require_role(role: str) -> None:
    """Raise Forbidden unless the caller has the role, or nobody has one here."""
    who = caller.get()
    if who is not ANYBODY and who.role != role:
        raise Forbidden(str(who), f"a certificate with the role {role}")


def require_name(client_id: str) -> None:
    """Raise Forbidden if the caller's certificate is another client's."""
    who = caller.get()
    if who is not ANYBODY and who.name != client_id:
        raise Forbidden(str(who), f"a certificate with the name {client_id!r}, or client_id = {who.name!r} in the client")


def actor() -> str:
    """The caller, as history names it."""
    who = caller.get()
    return "admin" if who is ANYBODY else str(who)
