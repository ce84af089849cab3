"""Waiting for sessions, and between tries."""

from __future__ import annotations

import asyncio

import pytest

from fl_client.errors import Refused, Unreachable
from fl_client.link import Backoff, Link, Session, Waits


def test_waits_double_up_to_the_longest():
    """From 1 s to 5 s: each wait is between half and all of 1, 2, 4, 5, 5; a reset starts again."""
    backoff = Backoff(Waits(first=1, longest=5))
    for full in (1, 2, 4, 5, 5):
        assert full / 2 <= backoff.next() <= full
    backoff.reset()
    assert backoff.next() <= 1


async def test_a_call_waits_for_a_session():
    """Nothing is called while there is no session; the call goes out when one opens."""
    link, called = Link(Waits()), []

    async def call(session):
        called.append(session.id)

    task = asyncio.create_task(link.patiently(call))
    await asyncio.sleep(0)
    assert called == []
    link.open(Session("s1", None, 1, 1))
    await task
    assert called == ["s1"]


async def test_a_cut_call_is_made_again_in_the_next_session():
    """The first session's call is cut; the second session's call answers."""
    link = Link(Waits(first=0.001))
    link.open(Session("s1", None, 1, 1))

    async def call(session):
        if session.id == "s1":
            link.close()
            asyncio.get_running_loop().call_soon(link.open, Session("s2", None, 1, 1))
            raise Unreachable("cut")
        return session.id

    assert await link.patiently(call) == "s2"


async def test_a_refused_call_is_not_made_again():
    """What can never succeed is handed on."""
    link = Link(Waits())
    link.open(Session("s1", None, 1, 1))

    async def call(session):
        raise Refused(session.id)

    with pytest.raises(Refused):
        await link.patiently(call)
