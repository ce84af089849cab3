"""Login links and sessions of browsers. A session has the identity of the operator of its link, to read only.

They are in memory, by the hash of their secret: after a restart of the coordinator an operator asks for another link.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from fl_common.certificates.names import OPERATOR_ROLES
from fl_common.own_secrets import new_key, new_secret
from fl_server.enrollment.revocations import Revocations
from fl_server.errors import Forbidden, TooMany, Unauthenticated
from fl_server.identity import Identity

LINK_S = 60.0
"""A link can be used for this long."""
SESSION_S = 8 * 3600.0
"""Longest session. It ends with the operator's certificate or token before that."""
MOST_LINKS = 16
"""Unused links of one operator; the oldest makes room."""
MOST_SESSIONS = 16
"""Sessions of one operator; the oldest makes room."""
MOST_OF_ALL = 4096
"""Sessions of all operators."""
_AGAIN = "ask for another link with `fl web open`"


@dataclass(frozen=True, slots=True)
class Opened:
    """A new link or session."""

    secret: str
    ends: float
    """Unix seconds."""
    holder: Identity


class _Held:
    """Secrets by their hash, each with its holder and its end. The oldest first."""

    def __init__(self, key: bytes, per_holder: int, why: str) -> None:
        self._key, self._per_holder, self._why = key, per_holder, why
        self._holders: OrderedDict[bytes, tuple[Identity, float]] = OrderedDict()

    def add(self, who: Identity, seconds: float) -> Opened:
        """A new secret of a holder, which ends with the holder's certificate at the latest. Raises TooMany."""
        now = time.time()
        own = [key for key, (holder, _) in self._holders.items() if (holder, holder.source) == (who, who.source)]
        ended = [key for key, (_, ends) in self._holders.items() if ends <= now]
        for key in {*own[: max(0, len(own) + 1 - self._per_holder)], *ended}:
            del self._holders[key]
        if len(self._holders) >= MOST_OF_ALL:
            raise TooMany(f"{MOST_OF_ALL:,} {self._why}, which is the limit", LINK_S, routine=True)
        secret, ends = new_secret(self._key), min(now + seconds, inf if who.ends is None else who.ends)
        self._holders[_hash(secret)] = who, ends
        return Opened(secret, ends, who)

    def of(self, secret: str) -> Identity | None:
        """The holder of a secret that has not ended."""
        who, ends = self._holders.get(_hash(secret), (None, 0.0))
        return who if time.time() < ends else None

    def remove(self, secret: str) -> None:
        """Forget a secret."""
        self._holders.pop(_hash(secret), None)

    def drop_denied(self, revocations: Revocations) -> None:
        """Forget the secrets of holders whose certificates are revoked now."""
        for key in [key for key, (holder, _) in self._holders.items() if revocations.denied(holder)]:
            del self._holders[key]


class WebSessions:
    """The links and sessions of one coordinator. Lives on the event loop."""

    def __init__(self, revocations: Revocations) -> None:
        self._revocations = revocations
        self.url = ""
        """The address of the page, as browsers reach it."""
        self.key = new_key()
        """Key of codes and sessions: the web process tells made-up ones by it (`fl_common/own_secrets.py`)."""
        self._links = _Held(self.key, MOST_LINKS, "login links are open")
        self._sessions = _Held(self.key, MOST_SESSIONS, "sessions are open")

    def link(self, who: Identity) -> Opened:
        """A code for one login of an operator."""
        return self._links.add(_operator(who), LINK_S)

    def holder_of_link(self, code: str) -> Identity:
        """The operator whose link a code is of. Raises Unauthenticated."""
        if (holder := self._links.of(code)) is None:
            raise Unauthenticated(f"the login link is unknown, used or older than {LINK_S:.0f} s: {_AGAIN}")
        return holder

    def open_by_code(self, code: str) -> Opened:
        """A session for a code, which is used up. Raises Unauthenticated."""
        holder = self.holder_of_link(code)
        self._links.remove(code)
        return self._open(holder)

    def open_by_certificate(self, who: Identity) -> Opened:
        """A session for the holder of a verified certificate. Raises Forbidden, CertificateEnded, Unauthenticated."""
        who.check_time()
        return self._open(_operator(who))

    def _open(self, who: Identity) -> Opened:
        if why := self._revocations.denied(who):
            raise Unauthenticated(f"the certificate of {who} is revoked ({why})")
        return self._sessions.add(who, SESSION_S)

    def close(self, secret: str) -> Identity | None:
        """End a session. Returns its holder; None for one that has ended or is unknown."""
        holder = self._sessions.of(secret)
        self._sessions.remove(secret)
        return holder

    def drop_denied(self) -> None:
        """End the links and sessions of operators whose certificates are revoked now."""
        self._links.drop_denied(self._revocations)
        self._sessions.drop_denied(self._revocations)

    async def identity(self, token: str) -> Identity:
        """The operator of a session; `Tokens` for the web process's socket. Raises Unauthenticated."""
        if (holder := self._sessions.of(token)) is None:
            raise Unauthenticated(f"the session of this browser has ended: {_AGAIN}")
        return holder


def _operator(who: Identity) -> Identity:
    if who.roles.isdisjoint(OPERATOR_ROLES):
        raise Forbidden(str(who), "the role of an operator", OPERATOR_ROLES)
    return who


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
