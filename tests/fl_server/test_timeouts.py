"""Time limits that share one timer."""

from __future__ import annotations

import asyncio

import pytest

from fl_server.uploads.stream import TimeLimit


async def test_a_wait_ends_at_its_limit() -> None:
    """Each at its own, in any order, and a wait that ends before is not disturbed."""
    order: list[str] = []

    async def wait(name: str, limit: float, seconds: float) -> None:
        try:
            with TimeLimit(limit):
                await asyncio.sleep(seconds)
        except TimeoutError:
            order.append(f"{name} is late")
        else:
            order.append(name)

    await asyncio.gather(wait("a", 0.4, 60.0), wait("b", 0.2, 60.0), wait("c", 60.0, 0.05), wait("d", 60.0, 0.6))
    assert sorted(order) == ["a is late", "b is late", "c", "d"]
    assert order.index("b is late") < order.index("a is late")


async def test_a_cancelled_wait_is_no_timeout() -> None:
    """Also when the time is over at the same moment."""

    async def wait() -> None:
        with TimeLimit(0.05):
            await asyncio.sleep(60.0)

    for pause in (0.0, 0.05):
        task = asyncio.create_task(wait())
        await asyncio.sleep(pause)
        cancelled = task.cancel()
        with pytest.raises((asyncio.CancelledError, TimeoutError)) as caught:
            await task
        assert not cancelled or pause or caught.type is asyncio.CancelledError


async def test_limits_may_be_nested() -> None:
    """The inner limit ends the inner wait only; an error of the block passes unchanged."""
    with TimeLimit(60.0):
        with pytest.raises(TimeoutError), TimeLimit(0.01):
            await asyncio.sleep(60.0)
        await asyncio.sleep(0.02)
    with pytest.raises(KeyError), TimeLimit(60.0):
        raise KeyError


async def test_many_waits_have_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer for each message would be most of the work of an upload's loop."""
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def counted(*args: object, **kwargs: object) -> asyncio.TimerHandle:
        timers.append(args)
        return call_at(*args, **kwargs)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(loop, "call_at", counted)
    for _ in range(100):
        with TimeLimit(60.0):
            pass
    assert len(timers) <= 1
