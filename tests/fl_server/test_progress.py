"""What watchers are told, and what is remembered of a run's rounds."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st

from fl_server.progress import Progress, RoundLog, Watchers
from fl_server.stop_rules import Best, best_round
from tests.fl_server.store.records import a_commit


async def names(events):
    """All events until the end."""
    return [progress.event async for progress in events]


async def test_watchers_hear_what_happens_while_they_watch():
    """Nothing from before, everything until the end, each of them."""
    watchers = Watchers()
    watchers.tell(Progress("early"))
    with watchers.watch() as first, watchers.watch() as second:
        watchers.tell(Progress("phase"))
        watchers.tell(Progress("committed"))
        watchers.end()
        assert await names(first) == await names(second) == ["phase", "committed"]


async def test_who_stopped_watching_is_told_nothing():
    """Its events are not kept either."""
    watchers = Watchers()
    with watchers.watch() as events:
        pass
    watchers.tell(Progress("phase"))
    watchers.end()
    assert not watchers._queues
    await events.aclose()


async def test_a_watcher_that_does_not_keep_up_is_ended(monkeypatch):
    """It gets what there was room for, and then an end instead of gaps; others go on."""
    monkeypatch.setattr(Watchers, "_BACKLOG", 2)
    watchers = Watchers()
    with watchers.watch() as slow, watchers.watch() as quick:
        heard = []
        for event in "abcd":
            watchers.tell(Progress(event))
            heard.append((await anext(quick)).event)
        assert await asyncio.wait_for(names(slow), 5) == ["a", "b"]
        assert (heard, len(watchers._queues)) == (["a", "b", "c", "d"], 1)


def test_the_log_of_rounds():
    """Latest and best; bytes of the round under way count until it is committed, and then in its record."""
    log = RoundLog("accuracy")
    assert (log.latest, log.best, log.total_bytes) == (None, None, (0, 0))
    log.bytes_down, log.bytes_up = 5, 6
    log.add(a_commit(0, bytes_down=10, bytes_up=20))
    log.add(a_commit(1, bytes_down=1, bytes_up=2))
    log.bytes_down = 100
    assert log.total_bytes == (111, 22)
    assert log.evaluated(0, {"accuracy": 0.9}).metrics == {"accuracy": 0.9}
    log.evaluated(1, {"accuracy": 0.5})
    assert (log.latest.round, log.best) == (1, Best(0, 0.9))
    assert log.evaluations == [(0, {"accuracy": 0.9}), (1, {"accuracy": 0.5})]


def test_the_log_joins_what_server_and_clients_found():
    """Neither takes the other's metrics away, and a round counts as evaluated by whom the run's metric comes from."""
    server, clients = RoundLog("accuracy"), RoundLog("clients_accuracy_mean")
    for log in (server, clients):
        log.add(a_commit(0))
        log.add(a_commit(1))
        log.evaluated(0, {"accuracy": 0.9})
        assert log.evaluated(0, {"clients_evaluated": 0.0}).metrics == {"accuracy": 0.9, "clients_evaluated": 0.0}
        log.evaluated(1, {"clients_evaluated": 1.0, "clients_accuracy_mean": 0.4})
    assert [round_ for round_, _ in server.evaluations] == [0]
    assert [round_ for round_, _ in clients.evaluations] == [0, 1]
    assert (server.best, clients.best) == (Best(0, 0.9), Best(1, 0.4))


VALUES = st.sampled_from([0.1, 0.5, 0.9, math.nan])


@given(st.lists(st.tuples(st.integers(0, 5), VALUES)))
def test_the_best_round_is_that_of_all_evaluations(told):
    """Whatever order they come in, also where a round is evaluated anew and has become worse."""
    log = RoundLog("accuracy")
    for round_ in range(6):
        log.add(a_commit(round_))
    for round_, value in told:
        log.evaluated(round_, {"accuracy": value})
        assert log.best == best_round("accuracy", log.evaluations)
