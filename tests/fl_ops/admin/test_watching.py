"""A watch goes on after a lost connection, and fails at once where waiting would not help."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fl_ops.admin.watching import watch
from fl_ops.errors import NotFound, OpsError, Unreachable
from fl_ops.render.watching import Lost
from protos.fl.v1 import admin_pb2

RUNNING = admin_pb2.WatchRunResponse(event="snapshot", run=admin_pb2.RunStatus(state=admin_pb2.RUN_STATE_RUNNING))
DONE = admin_pb2.WatchRunResponse(event="state", run=admin_pb2.RunStatus(state=admin_pb2.RUN_STATE_COMPLETED))
Call = list[admin_pb2.WatchRunResponse | OpsError]


def client(*streams: Call) -> Any:
    """Opens one stream after the other; an error in a stream is raised there."""
    left = iter(streams)

    asked: list[int | None] = []

    def watch_run(run_id: str, first_round: int | None = None) -> Iterator[admin_pb2.WatchRunResponse]:
        assert run_id == "digits-1"
        asked.append(first_round)
        for event in next(left):
            if isinstance(event, OpsError):
                raise event
            yield event

    return SimpleNamespace(runs=SimpleNamespace(watch_run=watch_run, asked=asked))


def of_round(event: str, number: int) -> admin_pb2.WatchRunResponse:
    """An event of a round."""
    return admin_pb2.WatchRunResponse(event=event, round=admin_pb2.RoundSummary(round=number))


def test_rounds_that_were_missed_are_asked_for() -> None:
    """From the one after the newest that was seen on: 5 are done at first, 5 and 6 come, and 7 and 8 are missed."""
    snapshot = admin_pb2.WatchRunResponse(event="snapshot", run=admin_pb2.RunStatus(rounds_done=5))
    missed: Call = [of_round("committed_before", number) for number in (7, 8)]
    first: Call = [snapshot, of_round("committed", 5), of_round("committed", 6), Unreachable("cut")]
    coordinator = client(first, [Unreachable("down")], [*missed, RUNNING, Unreachable("cut")], [DONE])
    seen = list(watch(coordinator, "digits-1", lambda _seconds: None))
    assert [event for event in seen if event in missed] == missed
    assert coordinator.runs.asked == [None, 7, 7, 9]


def test_it_goes_on_after_outages() -> None:
    """Each outage is noted once, however often the address is tried; waits grow to ten seconds and start again."""
    waits: list[float] = []
    down: list[Call] = [[Unreachable("down")] for _ in range(6)]
    coordinator = client([RUNNING, Unreachable("cut")], *down, [RUNNING], [RUNNING, DONE])
    seen = list(watch(coordinator, "digits-1", waits.append))
    assert seen == [RUNNING, Lost("cut"), RUNNING, Lost("the coordinator closed the connection"), RUNNING, DONE]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 0.5]


def test_a_wrong_address_is_reported_at_once() -> None:
    """Nothing has answered there before, so the address is probably wrong."""
    with pytest.raises(Unreachable, match="nobody"):
        list(watch(client([Unreachable("nobody")]), "digits-1"))


def test_a_coordinator_that_answered_before_is_waited_for() -> None:
    """Another call succeeded, and the coordinator is away when the watch begins."""
    assert list(watch(client([Unreachable("nobody")], [DONE]), "digits-1", lambda _seconds: None, connected=True))[
        1:
    ] == [DONE]


def test_a_refusal_ends_the_wait() -> None:
    """A coordinator that answers otherwise is no outage: for example its state directory is another one."""
    with pytest.raises(NotFound):
        list(watch(client([RUNNING], [NotFound("no run")]), "digits-1", lambda _seconds: None))


def test_the_event_with_the_reason_of_the_end_is_not_missed() -> None:
    """An event before it already has the status of the ended run. Without the event the end of the stream counts."""
    evaluated = admin_pb2.WatchRunResponse(event="evaluated", run=DONE.run)
    assert list(watch(client([RUNNING, evaluated, DONE]), "digits-1")) == [RUNNING, evaluated, DONE]
    assert list(watch(client([RUNNING, evaluated]), "digits-1")) == [RUNNING, evaluated]
