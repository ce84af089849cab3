"""Readings of views that several pages share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from grpc.aio import insecure_channel

from fl_web.coordinator.calls import Failed
from fl_web.coordinator.reader import Reader
from fl_web.live import Readings, Shown
from fl_web.views.view import Context, Params, View


class Counted:
    """A view that counts how often it is read, and fails when it is asked to."""

    def __init__(self) -> None:
        self.reads = 0
        self.fails = False
        self.view = View("counted", self._context)

    async def _context(self, reader: Reader, params: Params) -> Context:
        self.reads = number = self.reads + 1
        await asyncio.sleep(0.01)
        if self.fails:
            raise Failed("no")
        return {"read": number}


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    """A Reader without a coordinator."""
    async with insecure_channel("127.0.0.1:1") as channel:
        reader = Reader(channel)
        yield reader
        await reader.close()


async def test_pages_that_show_the_same_read_once(reader: Reader) -> None:
    """Also those that come later and need nothing newer."""
    counted, readings, since = Counted(), Readings(), time.monotonic()
    page = Params({"q": ["a"]})
    await asyncio.gather(*(readings.of(Shown(counted.view, reader, page), since) for _ in range(40)))
    assert (await readings.of(Shown(counted.view, reader, Params({"q": ["a"]})), since)).context == {"read": 1}


async def test_a_change_is_read_again(reader: Reader) -> None:
    """A reading that began before a change does not serve a page that has heard of it, also while it goes on."""
    counted, readings = Counted(), Readings()
    first = asyncio.create_task(readings.of(Shown(counted.view, reader, Params({})), time.monotonic()))
    await asyncio.sleep(0)
    changed = time.monotonic()
    second = await readings.of(Shown(counted.view, reader, Params({})), changed)
    assert ((await first).context, second.context) == ({"read": 1}, {"read": 2})


async def test_other_values_and_other_identities_are_read_for_themselves(reader: Reader) -> None:
    """Two addresses of a view, and two sessions, share nothing."""
    counted, readings, since = Counted(), Readings(), time.monotonic()
    async with insecure_channel("127.0.0.1:1") as channel:
        other = Reader(channel)
        for who, query in ((reader, "a"), (reader, "b"), (other, "a")):
            await readings.of(Shown(counted.view, who, Params({"q": [query]})), since)
    assert counted.reads == 3


async def test_a_failure_is_for_those_who_waited(reader: Reader) -> None:
    """The next page reads again."""
    counted, readings, since = Counted(), Readings(), time.monotonic()
    counted.fails = True
    both = await asyncio.gather(
        *(readings.of(Shown(counted.view, reader, Params({})), since) for _ in range(2)), return_exceptions=True
    )
    assert [type(reading) for reading in both] == [Failed, Failed]
    counted.fails = False
    assert (await readings.of(Shown(counted.view, reader, Params({})), since)).context == {"read": 2}
