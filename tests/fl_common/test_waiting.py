"""Work that goes on if the one who waits for it is cancelled."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from structlog.testing import capture_logs

from fl_common.waiting import shielded


@pytest.fixture
def complaints() -> list[str]:
    """What asyncio says of errors that nobody has asked for."""
    said: list[str] = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: said.append(context["message"]))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(_work_without_a_caller(said))
    return said


async def _work_without_a_caller(said: list[str]) -> None:
    """A caller waits for work that fails after the caller is cancelled."""
    goes_on = asyncio.Event()

    async def work() -> None:
        await goes_on.wait()
        raise OSError("the disk is full")

    with capture_logs() as logs:
        caller = asyncio.create_task(shielded(work()))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait({caller})
        goes_on.set()
        await asyncio.sleep(0.01)
        gc.collect()
    said += [f"{line['event']}: {line['error']}" for line in logs]


def test_an_error_after_the_caller_has_left_is_one_line(complaints: list[str]) -> None:
    """It is logged once, and asyncio does not report it as a fault."""
    assert complaints == ["failed_after_its_caller_left: OSError('the disk is full')"]


async def test_an_error_goes_to_the_caller() -> None:
    """And is not logged."""

    async def work() -> None:
        raise OSError("the disk is full")

    with capture_logs() as logs, pytest.raises(OSError, match="the disk is full"):
        await shielded(work())
    assert logs == []


async def test_work_is_done_to_its_end() -> None:
    """A cancelled caller leaves it running, and another caller gets its result."""
    goes_on = asyncio.Event()

    async def work() -> int:
        await goes_on.wait()
        return 3

    shared = asyncio.create_task(work())
    callers = [asyncio.create_task(shielded(shared)) for _ in range(2)]
    await asyncio.sleep(0)
    callers[0].cancel()
    goes_on.set()
    assert await callers[1] == 3
    assert callers[0].cancelled()


async def test_an_error_is_free_when_its_caller_drops_it() -> None:
    """Without a garbage collection: the frames of its traceback may hold a model."""

    class Failed(Exception):
        """One that a weak reference can follow."""

    async def work() -> None:
        raise Failed

    async def caller() -> weakref.ref[Failed]:
        try:
            await shielded(asyncio.create_task(work()))
        except Failed as error:
            return weakref.ref(error)
        raise AssertionError("it did not fail")

    gc.disable()
    try:
        error = await caller()
        await asyncio.sleep(0)
        assert error() is None
    finally:
        gc.enable()
