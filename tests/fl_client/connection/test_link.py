"""Waits for sessions and between retries."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from fl_client.connection.link import Backoff, Link, RetryDelays, Session
from fl_client.connection.transport import GrpcTransport
from fl_client.errors import Refused, Unreachable

NO_CONNECTION = cast(GrpcTransport, None)
"""These tests make no calls."""


def test_waits_double_up_to_the_longest() -> None:
    """From 1 s to 5 s: each wait is between half and all of 1, 2, 4, 5, 5; a reset starts again."""
    backoff = Backoff(RetryDelays(first=1, longest=5))
    for full in (1, 2, 4, 5, 5):
        assert full / 2 <= backoff.next() <= full
    backoff.reset()
    assert backoff.next() <= 1


async def test_a_call_waits_for_a_session() -> None:
    """No call is made without a session. The call is made once one opens."""
    link, called = Link(RetryDelays()), []

    async def call(session: Session) -> None:
        called.append(session.id)

    task = asyncio.create_task(link.call_with_retry(call))
    await asyncio.sleep(0)
    assert called == []
    link.open(Session("s1", NO_CONNECTION, 1, 1))
    await task
    assert called == ["s1"]


async def test_a_cut_call_is_made_again_in_the_next_session() -> None:
    """The first session's call is cut; the second session's call succeeds."""
    link = Link(RetryDelays(first=0.001))
    link.open(Session("s1", NO_CONNECTION, 1, 1))

    async def call(session: Session) -> str:
        if session.id == "s1":
            link.close()
            asyncio.get_running_loop().call_soon(link.open, Session("s2", NO_CONNECTION, 1, 1))
            raise Unreachable("cut")
        return session.id

    assert await link.call_with_retry(call) == "s2"


async def test_a_refused_call_is_not_made_again() -> None:
    """An error that a retry cannot repair is passed on."""
    link = Link(RetryDelays())
    link.open(Session("s1", NO_CONNECTION, 1, 1))

    async def call(session: Session) -> None:
        raise Refused(session.id)

    with pytest.raises(Refused):
        await link.call_with_retry(call)
