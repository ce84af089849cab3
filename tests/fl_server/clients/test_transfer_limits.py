"""Limits of one client's calls, fetches and bytes; refusals are counted, logged and delayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from fl_server.clients import transfer_limits as module
from fl_server.clients.transfer_limits import Allowance, Kind, TransferLimits
from fl_server.errors import LimitExceeded
from fl_server.metrics import Metrics
from fl_server.settings.sections import TransfersConfig
from tests.fl_server.harness import until

MIB = 1 << 20
KINDS: tuple[Kind, ...] = ("uploads", "downloads", "queries", "attends")


@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_a_kind_at_once_are_limited(kind: Kind) -> None:
    """A call that ends allows another; other kinds have their own limit."""
    allowance = Allowance(TransfersConfig.model_validate({f"{kind}_at_once": 2}))
    assert [allowance.begin(kind, 0) for _ in range(2)] == [None, None]
    excess = allowance.begin(kind, 0)
    assert excess is not None
    assert (excess.limit, excess.wait_s) == (kind, 1.0)
    assert excess.expected == f"2 {kind} at once (transfers.{kind}_at_once)"
    assert all(allowance.begin(other, 0) is None for other in KINDS if other != kind)
    allowance.end(kind)
    assert allowance.begin(kind, 0) is None


def calls(allowance: Allowance, now: float) -> int:
    """Calls that are taken before the first that is refused."""
    count = 0
    while allowance.begin("queries", now) is None:
        allowance.end("queries")
        count += 1
    return count


def test_calls_have_a_rate_and_new_work_grants_a_burst() -> None:
    """Work that was sent before grants nothing: a client could attach again and again."""
    allowance = Allowance(TransfersConfig(calls=10, calls_per_s=2))
    assert calls(allowance, now=0) == 10
    assert calls(allowance, now=1) == 2
    for work in ("round 0", "evaluation 0"):
        allowance.assigned(work)
        assert calls(allowance, now=1) == 10
    allowance.assigned("round 0")
    allowance.assigned("evaluation 0")
    assert calls(allowance, now=1) == 0


def fetched(allowance: Allowance, now: float, size: int = 4 * MIB) -> int:
    """Whole fetches of one resource that are sent before the first that is not."""
    count = 0
    while True:
        fetch = allowance.fetch(b"digest", size)
        if any(fetch.send(MIB, now) for _ in range(size // MIB)):
            return count
        count += 1


def test_whole_fetches_of_a_resource_for_one_assignment_are_limited() -> None:
    """Further ones have a rate. The next assignment starts at 0, and another resource has its own count."""
    allowance = Allowance(TransfersConfig(fetches=3, fetch_again_s=30))
    assert fetched(allowance, now=0) == 3
    assert fetched(allowance, now=31) == 1
    allowance.assigned("round 1")
    assert fetched(allowance, now=31) == 3
    allowance.assigned("round 1")
    assert fetched(allowance, now=31) == 0
    assert allowance.fetch(b"other", MIB).send(MIB, 31) is None


def test_an_interrupted_fetch_counts_only_what_was_sent() -> None:
    """A download that resumes costs the bytes that are sent."""
    allowance = Allowance(TransfersConfig(fetches=1, fetch_again_s=30))
    for _ in range(4):
        assert allowance.fetch(b"digest", 4 * MIB).send(MIB, 0) is None
    excess = allowance.fetch(b"digest", 4 * MIB).send(MIB, 0)
    assert excess is not None
    assert (excess.limit, excess.wait_s) == ("fetches", 30)


def test_the_rate_of_bytes_is_unlimited_unless_it_is_set() -> None:
    """With a rate there is a pause after more than a second's bytes."""
    assert Allowance(TransfersConfig()).pause_s(1 << 40, 0) == 0
    allowance = Allowance(TransfersConfig(bytes_per_s=100))
    assert [allowance.pause_s(100, 0), allowance.pause_s(50, 0)] == [0, pytest.approx(0.5)]


def test_a_limited_number_of_resources_is_remembered() -> None:
    """A coordinator that sends many bundles keeps no entry of each for each client."""
    allowance = Allowance(TransfersConfig())
    for number in range(1000):
        allowance.fetch(number.to_bytes(2, "big"), MIB)
    assert len(allowance._fetches) == 64


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are not delayed."""
    monkeypatch.setattr(module, "REFUSAL_DELAY_S", 0.0)


def made(most: int = 100, **limits: float) -> tuple[TransferLimits, Callable[..., float | None]]:
    """TransferLimits, and a function that reads their metrics."""
    metrics = Metrics(CollectorRegistry())

    def read(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    return TransferLimits(TransfersConfig.model_validate(limits), metrics, most), read


async def test_a_call_beyond_a_limit_is_refused_and_counted() -> None:
    """Another client's calls are served, and so are the client's own after one has ended."""
    limits, read = made(uploads_at_once=1)
    assert read("fl_transfer_calls", kind="downloads") == 0
    async with limits.call("a", "uploads"):
        with pytest.raises(LimitExceeded, match=r"expected at most 1 uploads at once .*; try again in 1 s"):
            async with limits.call("a", "uploads"):
                pass
        async with limits.call("b", "uploads"):
            assert read("fl_transfer_calls", kind="uploads") == 2
    async with limits.call("a", "uploads"):
        assert read("fl_transfer_calls", kind="uploads") == 1
    assert read("fl_transfer_limits_total", limit="uploads") == 1
    assert read("fl_transfer_calls", kind="uploads") == 0


async def test_many_refusals_are_one_log_line() -> None:
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


async def test_a_limited_number_of_refusals_is_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ones are sent at once: a delayed refusal costs memory."""
    monkeypatch.setattr(module, "REFUSAL_DELAY_S", 60.0)
    monkeypatch.setattr(module, "_MOST_DELAYED", 2)
    limits, _ = made(queries_at_once=1)

    async def call() -> None:
        async with limits.call("a", "queries"):
            pass

    async with limits.call("a", "queries"):
        delayed = [asyncio.create_task(call()) for _ in range(2)]
        await until(lambda: limits.of("a").delayed == 2, "two are delayed")
        with pytest.raises(LimitExceeded):
            await call()
        assert not any(task.done() for task in delayed)
        for task in delayed:
            task.cancel()
        await asyncio.gather(*delayed, return_exceptions=True)
    assert limits.of("a").delayed == 0


async def test_a_limited_number_of_clients_is_remembered() -> None:
    """The one that called longest ago is dropped first, unless it has an open call."""
    limits, _ = made(most=10)
    async with limits.call("busy", "uploads"):
        for number in range(1000):
            limits.assigned(f"client-{number}", "work")
        assert len(limits) <= 11
        assert limits.of("busy").allowance.in_use


async def test_one_client_uses_at_most_two_threads_of_a_pool() -> None:
    """A third piece of its work waits; another client's does not."""
    limits, _ = made()
    started: list[str] = []
    release = asyncio.Event()

    async def work(name: str) -> None:
        started.append(name)
        await release.wait()

    async def share(name: str) -> None:
        async with limits.of(name[0]).share:
            await work(name)

    tasks = [asyncio.create_task(share(name)) for name in ("a1", "a2", "a3", "b1")]
    await until(lambda: len(started) == 3, "three have started")
    assert started == ["a1", "a2", "b1"]
    release.set()
    await asyncio.gather(*tasks)
    assert started[-1] == "a3"


async def test_bytes_are_paced_where_a_rate_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes for two seconds at once: the second half waits and is not refused; without a rate there is no wait."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    limits, _ = made(bytes_per_s=1e6)
    unlimited, _ = made()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await limits.of("a").pace(2_000_000)
    await unlimited.of("a").pace(2_000_000)
    assert pauses == [pytest.approx(1.0, abs=0.01)]
