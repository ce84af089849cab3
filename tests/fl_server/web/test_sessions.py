"""Login links and sessions: one use, their ends, their limits, and what is kept of them."""

from __future__ import annotations

import time
from unittest import mock

import pytest

from fl_server.errors import CertificateEnded, Forbidden, Unauthenticated
from fl_server.identity import ANYBODY, Identity
from fl_server.web import page
from fl_server.web.page import LINK_S, MOST_LINKS, MOST_SESSIONS, SESSION_S, WebSessions

REVOCATIONS = mock.Mock(denied=lambda who: "")
"""Nothing is revoked."""
VERA, ALICE = Identity("viewer", "vera", serial="1"), Identity("operator", "alice", serial="2")


class Clock:
    """The time of the module under test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr(page, "time", self)

    def time(self) -> float:
        """Unix seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still."""
    return Clock(monkeypatch)


async def test_a_link_is_for_one_session(clock: Clock) -> None:
    """The second use is refused, as is a wrong code; the session has the operator's own identity."""
    web = WebSessions(REVOCATIONS)
    link = web.link(VERA)
    session = web.open_by_code(link.secret)
    assert (link.ends, session.ends) == (clock.now + LINK_S, clock.now + SESSION_S)
    assert await web.identity(session.secret) is VERA
    for code in (link.secret, "wrong", "", "\N{SNOWMAN}", "\ud800"):
        with pytest.raises(Unauthenticated, match="unknown, used or older than 60 s"):
            web.open_by_code(code)


async def test_links_and_sessions_end(clock: Clock) -> None:
    """After their time, and with the operator's certificate before that."""
    web = WebSessions(REVOCATIONS)
    link, session = web.link(VERA), web.open_by_code(web.link(VERA).secret)
    short = Identity("viewer", "vera", ends=clock.now + 100)
    soon = web.open_by_code(web.link(short).secret)
    assert soon.ends == clock.now + 100
    clock.now += LINK_S
    with pytest.raises(Unauthenticated):
        web.open_by_code(link.secret)
    clock.now += 40
    with pytest.raises(Unauthenticated, match="ask for another link with `fl web open`"):
        await web.identity(soon.secret)
    clock.now += SESSION_S - 101
    assert await web.identity(session.secret) is VERA
    clock.now += 1
    with pytest.raises(Unauthenticated):
        await web.identity(session.secret)


async def test_revoked_operators_lose_links_and_sessions() -> None:
    """Those of others stay. A revoked certificate opens no new session."""
    denied: set[str] = set()
    web = WebSessions(mock.Mock(denied=lambda who: "lost" if who.serial in denied else ""))
    link, theirs = web.link(VERA), web.open_by_code(web.link(VERA).secret)
    other = web.open_by_code(web.link(ALICE).secret)
    denied.add("1")
    web.drop_denied()
    with pytest.raises(Unauthenticated):
        web.open_by_code(link.secret)
    with pytest.raises(Unauthenticated):
        web.open_by_certificate(VERA)
    with pytest.raises(Unauthenticated):
        await web.identity(theirs.secret)
    assert await web.identity(other.secret) is ALICE


async def test_an_operators_oldest_ones_make_room() -> None:
    """A lost browser does not lock its operator out, and no operator takes the room of others."""
    web = WebSessions(REVOCATIONS)
    other = web.open_by_code(web.link(ALICE).secret)
    opened = [web.open_by_code(web.link(VERA).secret) for _ in range(MOST_SESSIONS + 1)]
    with pytest.raises(Unauthenticated):
        await web.identity(opened[0].secret)
    assert await web.identity(opened[1].secret) is VERA
    assert await web.identity(other.secret) is ALICE
    links = [web.link(VERA) for _ in range(MOST_LINKS + 1)]
    with pytest.raises(Unauthenticated):
        web.open_by_code(links[0].secret)
    web.open_by_code(links[1].secret)


@pytest.mark.parametrize("who", [ANYBODY, Identity("client", "edge-1"), Identity("server", "s")], ids=str)
def test_only_operators_get_in(who: Identity) -> None:
    """A device's certificate opens nothing."""
    for enter in (WebSessions(REVOCATIONS).link, WebSessions(REVOCATIONS).open_by_certificate):
        with pytest.raises(Forbidden):
            enter(who)


def test_a_certificate_that_has_ended() -> None:
    """It opens no session."""
    with pytest.raises(CertificateEnded):
        WebSessions(REVOCATIONS).open_by_certificate(Identity("viewer", "vera", ends=time.time() - 1))


def test_no_secret_is_kept() -> None:
    """Only hashes: a dump of the coordinator's memory is no login."""
    web = WebSessions(REVOCATIONS)
    link, session = web.link(VERA), web.open_by_code(web.link(VERA).secret)
    kept = repr([vars(held) for held in (web._links, web._sessions)])
    assert link.secret not in kept
    assert session.secret not in kept
