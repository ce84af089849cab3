"""The thread that trains."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable

import pytest
import torch

from fl_client.training.results import Interrupted
from fl_client.training.worker import Worker


async def test_work_runs_with_the_configured_torch_threads() -> None:
    """The number of threads decides the bits of a sum, so it is set where the work runs."""
    assert await Worker(1).run(lambda check: torch.get_num_threads()) == 1


async def test_cancelled_work_stops_at_its_next_check() -> None:
    """The function ends by an exception inside it, and the thread is free again."""
    worker, started, ended = Worker(1), threading.Event(), []

    def endless(check: Callable[[], None]) -> None:
        started.set()
        try:
            while True:
                check()
        except Interrupted:
            ended.append(True)
            raise

    task = asyncio.create_task(worker.run(endless))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await worker.shut_down(10)
    assert ended == [True]


async def test_work_that_has_not_begun_never_begins() -> None:
    """A function that is cancelled while it waits for the thread is not called."""
    worker, release, called = Worker(1), threading.Event(), []
    first = asyncio.create_task(worker.run(lambda check: release.wait()))
    second = asyncio.create_task(worker.run(lambda check: called.append(True)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    release.set()
    await first
    assert await worker.shut_down(10)
    assert called == []


async def test_idle_time_counts_from_the_last_work() -> None:
    """It is infinite before any work, 0 while the thread computes, and grows from the end of the work."""
    worker = Worker(1)
    assert worker.idle_for() == math.inf
    assert await worker.run(lambda check: worker.idle_for()) == 0.0
    first = worker.idle_for()
    assert 0.0 <= first <= worker.idle_for() < math.inf
