"""The clients that call: refused beyond their limits, counted by limit, forgotten when there are many."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from fl_server.clients import transfer_limits as module
from fl_server.clients.transfer_limits import TransferLimits
from fl_server.config import TransfersConfig
from fl_server.errors import LimitExceeded
from fl_server.metrics import Metrics
from tests.fl_server.harness import until


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Refusals are not held."""
    monkeypatch.setattr(module, "HOLD_S", 0.0)


def made(most=100, **limits):
    """TransferLimits, and a look at a metric of theirs."""
    metrics = Metrics(CollectorRegistry())

    def look(name, **labels):
        return metrics.registry.get_sample_value(name, labels)

    return TransferLimits(TransfersConfig(**limits), metrics, most), look


async def test_a_call_beyond_a_limit_is_refused_and_counted():
    """Another client's calls go on, and so do the client's own when one is over."""
    limits, look = made(uploads_at_once=1)
    async with limits.call("a", "uploads"):
        with pytest.raises(LimitExceeded, match=r"expected at most 1 uploads at once .*; try again in 1 s"):
            async with limits.call("a", "uploads"):
                pass
        async with limits.call("b", "uploads"):
            assert look("fl_transfer_calls", kind="uploads") == 2
    async with limits.call("a", "uploads"):
        assert look("fl_transfer_calls", kind="uploads") == 1
    assert look("fl_transfer_limits_total", limit="uploads") == 1
    assert look("fl_transfer_calls", kind="uploads") == 0


async def test_a_storm_of_refusals_is_one_line_in_the_log():
    """For each client and minute."""
    limits, _ = made(calls=1, calls_per_s=0.001)
    with capture_logs() as logs:
        for client in "aab" * 50:
            try:
                async with limits.call(client, "queries"):
                    pass
            except LimitExceeded:
                pass
    assert [(entry["event"], entry["client"]) for entry in logs] == [("client_limited", "a"), ("client_limited", "b")]


async def test_refused_calls_are_held_but_only_so_many(monkeypatch):
    """The others are answered at once: what is held costs memory."""
    monkeypatch.setattr(module, "HOLD_S", 60.0)
    monkeypatch.setattr(module, "_MOST_HELD", 2)
    limits, _ = made(queries_at_once=1)

    async def ask():
        async with limits.call("a", "queries"):
            pass

    async with limits.call("a", "queries"):
        held = [asyncio.create_task(ask()) for _ in range(2)]
        await until(lambda: limits.of("a").held == 2, "two are held")
        with pytest.raises(LimitExceeded):
            await ask()
        assert not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    assert limits.of("a").held == 0


async def test_only_so_many_clients_are_remembered():
    """Who called longest ago is forgotten first, unless a call of his goes on."""
    limits, _ = made(most=10)
    async with limits.call("busy", "uploads"):
        for number in range(1000):
            limits.given(f"client-{number}", "work")
        assert len(limits) <= 11
        assert limits.of("busy").allowance.under_way


async def test_one_client_has_two_threads_of_a_pool_at_most():
    """A third piece of its work waits; another client's does not."""
    limits, _ = made()
    begun, go_on = [], asyncio.Event()

    async def work(name):
        begun.append(name)
        await go_on.wait()

    tasks = [
        asyncio.create_task(limits.of(name[0]).in_share(lambda name=name: work(name)))
        for name in ("a1", "a2", "a3", "b1")
    ]
    await until(lambda: len(begun) == 3, "three have begun")
    assert begun == ["a1", "a2", "b1"]
    go_on.set()
    await asyncio.gather(*tasks)
    assert begun[-1] == "a3"


async def test_bytes_are_paced_where_a_rate_is_set(monkeypatch):
    """Two seconds' worth at once: the second half is waited for, not refused; without a rate nobody waits."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    limits, _ = made(bytes_per_s=1e6)
    unlimited, _ = made()
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    await limits.of("a").pace(2_000_000)
    await unlimited.of("a").pace(2_000_000)
    assert pauses == [pytest.approx(1.0, abs=0.01)]
