"""Events for watchers of a run, and its rounds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_server.rounds.metrics import Best, Criterion, best_round
from fl_server.run.progress import Progress, Watchers
from fl_server.run.rounds import RunRounds
from tests.fl_server.criteria import BY_ACCURACY
from tests.fl_server.harness import TIMEOUT_S
from tests.fl_server.store.records import a_commit


async def names(events: AsyncIterator[Progress]) -> list[str]:
    """All events until the end."""
    return [progress.event async for progress in events]


async def test_a_watcher_gets_the_events_from_its_start_on() -> None:
    """Each watcher gets all events until the end, and none from before."""
    watchers = Watchers()
    watchers.publish(Progress("early"))
    with watchers.watch() as first, watchers.watch() as second:
        watchers.publish(Progress("phase"))
        watchers.publish(Progress("committed"))
        watchers.end()
        assert await names(first) == await names(second) == ["phase", "committed"]


async def test_a_watcher_that_stopped_gets_no_events() -> None:
    """Nothing is queued for it."""
    watchers = Watchers()
    with watchers.watch():
        pass
    watchers.publish(Progress("phase"))
    watchers.end()
    assert not watchers._queues


async def test_a_slow_watcher_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the queued events and then the end, without gaps; other watchers continue."""
    monkeypatch.setattr(Watchers, "_BACKLOG", 2)
    watchers = Watchers()
    with watchers.watch() as slow, watchers.watch() as quick:
        received = []
        for event in "abcd":
            watchers.publish(Progress(event))
            received.append((await anext(quick)).event)
        assert await asyncio.wait_for(names(slow), TIMEOUT_S) == ["a", "b"]
        assert (received, len(watchers._queues)) == (["a", "b", "c", "d"], 1)


async def test_events_of_single_clients_are_sent_at_a_bounded_rate() -> None:
    """Of a thousand updates a watcher gets the first and the latest; a commit is sent, and after what came before."""
    watchers = Watchers()
    with watchers.watch() as events:
        for number in range(1000):
            watchers.publish(Progress("admitted", f"client-{number}"))
        watchers.publish(Progress("committed"))
        watchers.end()
        received = [(progress.event, progress.detail) async for progress in events]
    assert received == [("admitted", "client-0"), ("admitted", "client-999; 998 more before"), ("committed", "")]


async def test_the_latest_event_of_a_client_is_sent_when_nothing_follows() -> None:
    """After a pause."""
    watchers = Watchers()
    with watchers.watch() as events:
        for client in "abc":
            watchers.publish(Progress("client_out", client))
        received = [(await asyncio.wait_for(anext(events), TIMEOUT_S)).detail for _ in range(2)]
    assert received == ["a", "c; 1 more before"]


async def test_a_slow_watcher_misses_events_of_single_clients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue does not grow with them, and it is not disconnected for them."""
    monkeypatch.setattr(Watchers, "_BACKLOG", 3)
    monkeypatch.setattr("fl_server.run.progress.FREQUENT_S", 0.0)
    watchers = Watchers()
    with watchers.watch() as slow:
        watchers.publish(Progress("phase"))
        for number in range(20):
            watchers.publish(Progress("admitted", str(number)))
            await asyncio.sleep(0.001)
        assert {queue.qsize() for queue in watchers._queues} == {3}
        assert (await anext(slow)).event == "phase"
        watchers.publish(Progress("committed"))
        watchers.end()
        assert (await names(slow))[-1] == "committed"


def test_a_status_is_made_once_for_all_watchers() -> None:
    """And not again for the same event."""
    numbers, progress = count(), Progress("phase")
    assert [progress.shown(lambda: next(numbers)) for _ in range(3)] == [0, 0, 0]
    assert next(numbers) == 1


def test_the_log_of_rounds() -> None:
    """Latest and best round; bytes of the open round are counted, and after the commit those of its record."""
    rounds = RunRounds(BY_ACCURACY)
    assert (rounds.latest, rounds.best, rounds.bytes.total) == (None, None, (0, 0))
    rounds.bytes.total_down, rounds.bytes.total_up = 5, 6
    rounds.add(a_commit(0, bytes_down=10, bytes_up=20))
    rounds.add(a_commit(1, bytes_down=1, bytes_up=2))
    rounds.bytes.total_down += 100
    assert rounds.bytes.total == (111, 22)
    assert rounds.add_metrics(a_commit(0), {"accuracy": 0.9}).metrics == {"accuracy": 0.9}
    rounds.add_metrics(a_commit(1), {"accuracy": 0.5})
    assert rounds.latest is not None
    assert (rounds.latest.round, rounds.best) == (1, Best(0, 0.9))
    assert rounds.evaluations(0)[0] == [(0, {"accuracy": 0.9}), (1, {"accuracy": 0.5})]


def test_the_log_joins_metrics_of_server_and_clients() -> None:
    """Neither removes the other's metrics. A round is evaluated once the source of the run's metric has reported."""
    server, clients = RunRounds(BY_ACCURACY), RunRounds(Criterion("clients_accuracy_mean", lower_is_better=False))
    for rounds in (server, clients):
        rounds.add(a_commit(0))
        rounds.add(a_commit(1))
        rounds.add_metrics(a_commit(0), {"accuracy": 0.9})
        assert rounds.add_metrics(a_commit(0), {"clients_evaluated": 0.0}).metrics == {
            "accuracy": 0.9,
            "clients_evaluated": 0.0,
        }
        rounds.add_metrics(a_commit(1), {"clients_evaluated": 1.0, "clients_accuracy_mean": 0.4})
    assert [round_ for round_, _ in server.evaluations(0)[0]] == [0]
    assert [round_ for round_, _ in clients.evaluations(0)[0]] == [0, 1]
    assert (server.best, clients.best) == (Best(0, 0.9), Best(1, 0.4))


VALUES = st.sampled_from([0.1, 0.5, 0.9, math.nan])


@given(st.lists(st.tuples(st.integers(0, 5), VALUES)))
def test_the_best_round_is_that_of_all_evaluations(evaluations: list[tuple[int, float]]) -> None:
    """In any order of evaluations, also if a round is evaluated again with a worse value."""
    rounds = RunRounds(BY_ACCURACY)
    for round_ in range(6):
        rounds.add(a_commit(round_))
    for round_, value in evaluations:
        rounds.add_metrics(a_commit(round_), {"accuracy": value})
        assert rounds.best == best_round(BY_ACCURACY, rounds.evaluations(0)[0])
