"""Open uploads and downloads, and what ends them."""

from __future__ import annotations

import asyncio

import pytest

from fl_server.transfers import Transfers

GONE = RuntimeError("banned")


async def forever():
    """What never comes."""
    await asyncio.Event().wait()


async def waiting(transfers, client, work):
    """A transfer that waits by now, and its task."""
    begun = asyncio.Event()

    async def take():
        with transfers.open(client) as transfer:
            begun.set()
            return await transfer.unless_ended(work)

    task = asyncio.create_task(take())
    await begun.wait()
    await asyncio.sleep(0)
    return task


async def test_what_waits_is_ended_at_once():
    """With the error that it was ended with, for all transfers of the client and nobody else's."""
    transfers = Transfers()
    first, second, other = [await waiting(transfers, client, forever()) for client in "aab"]
    transfers.end("a", GONE)
    assert await asyncio.gather(first, second, return_exceptions=True) == [GONE, GONE]
    assert not other.done()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_what_does_not_wait_is_told_when_it_asks():
    """A download looks between two messages."""
    transfers = Transfers()
    with transfers.open("a") as transfer:
        transfer.check()
        transfers.end("a", GONE)
        with pytest.raises(RuntimeError, match="banned"):
            transfer.check()
        with pytest.raises(RuntimeError, match="banned"):
            await transfer.unless_ended(forever())


async def test_a_transfer_that_is_over_is_not_ended():
    """The call has gone on to something else, or another client's."""
    transfers = Transfers()
    with transfers.open("a") as transfer:
        assert await transfer.unless_ended(asyncio.sleep(0, "all of it")) == "all of it"
    transfers.end("a", GONE)
    transfer.check()


async def test_a_client_that_hangs_up_is_no_ban():
    """Its call is cancelled from outside, and stays that; the work inside ends with it."""
    ended = asyncio.Event()

    async def work():
        try:
            await forever()
        finally:
            ended.set()

    task = await waiting(Transfers(), "a", work())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
