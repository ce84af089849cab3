"""The daemon's limits for its coordinator, with a scripted coordinator in this process."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import structlog
from structlog.testing import capture_logs

from fl_client.assignments import reports
from fl_client.assignments.deadline import DeadlineTimer, seconds_for
from fl_client.assignments.reports import MAX_CHUNKS, FailureReports, Upload
from fl_client.connection import reconnect, session
from fl_client.connection.link import Backoff, Link, RetryDelays, Session
from fl_client.connection.session import MIN_CHUNK_BYTES, session_of
from fl_client.connection.transport import GrpcTransport
from fl_client.errors import WorkFailed
from fl_client.gates.availability import AvailabilityMonitor
from fl_client.monitoring.logs import LogRate
from fl_client.storage.disk import DiskThread, StorageLimits
from fl_client.storage.pending_updates import PendingUpdate
from fl_client.training.results import Interrupted
from fl_client.training.worker import Worker
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, training_pb2
from tests.fl_client import storages
from tests.fl_client.fake_coordinator import FakeCoordinator
from tests.fl_client.fleet import Fleet

NO_CONNECTION = cast(GrpcTransport, SimpleNamespace(move_data_to=lambda address: None))
"""For sessions without calls."""

# RetryDelays.


def test_waits_that_a_coordinator_asks_for_are_bounded() -> None:
    """Waits from the daemon's first to its longest are kept. Shorter ones are ignored, longer ones are cut."""
    backoff = Backoff(RetryDelays(first=1.0, longest=8.0, max_requested=60.0))
    assert [backoff.after(asked) for asked in (1.0, 59.5, 60.5, 2.0**60, math.inf)] == [1.0, 59.5, 60.0, 60.0, 60.0]
    assert 0.5 <= backoff.after(-5.0) <= 1.0
    assert 1.0 <= backoff.after(0.0) <= 2.0
    assert 2.0 <= backoff.after(None) <= 4.0


async def test_connections_are_made_at_a_bounded_rate(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that ends every stream gets three connections at once, and then few."""
    monkeypatch.setattr(reconnect, "CONNECTION_BURST", 3)
    monkeypatch.setattr(reconnect, "CONNECTIONS_PER_S", 0.001)
    with capture_logs() as logs:
        async with fleet.daemon() as daemon:
            for times in range(1, 5):
                await coordinator.until_called("Attend", times)
                coordinator.hang_up()
                await daemon.until_counted("connection_attempts_total", times, result="failed")
    waits = [line["next_try_seconds"] for line in logs if line["event"] == "disconnected"]
    assert [wait > 100 for wait in waits] == [False, False, False, True]


# The session.


async def test_a_stream_without_attached_first_is_dropped(
    silent_coordinator: FakeCoordinator, make_fleet: Callable[[FakeCoordinator], Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its events is handled, and the daemon retries."""
    coordinator, fleet = silent_coordinator, make_fleet(silent_coordinator)
    real, rude = coordinator.Attend, [True]

    async def without_greeting(request: pb.AttendRequest, context: Any) -> AsyncIterator[pb.AttendResponse]:
        async for event in real(request, context):
            if not (rude and event.HasField("attached")):
                yield event

    monkeypatch.setattr(coordinator, "Attend", without_greeting)
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    with capture_logs() as logs:
        async with coordinator.serving(), fleet.daemon() as daemon:
            await daemon.until(lambda: daemon.count("connection_attempts_total", result="failed"))
            assert not coordinator.calls["FetchModel"]
            rude.clear()
            await coordinator.until(lambda: coordinator.updates)
    assert "expected Attached as the first event, got assignment" in str(logs)


async def test_a_stream_without_a_first_event_is_dropped(
    silent_coordinator: FakeCoordinator, make_fleet: Callable[[FakeCoordinator], Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator accepts the stream and sends nothing. After a while the daemon retries."""
    monkeypatch.setattr(session, "FIRST_EVENT_S", 0.05)
    coordinator, fleet = silent_coordinator, make_fleet(silent_coordinator)
    real, greets = coordinator.Attend, asyncio.Event()

    async def without_a_word(request: pb.AttendRequest, context: Any) -> AsyncIterator[pb.AttendResponse]:
        await greets.wait()
        async for event in real(request, context):
            yield event

    monkeypatch.setattr(coordinator, "Attend", without_a_word)
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    async with coordinator.serving(), fleet.daemon() as daemon:
        await daemon.until(lambda: daemon.count("connection_attempts_total", result="failed"))
        greets.set()
        monkeypatch.setattr(session, "FIRST_EVENT_S", 60.0)
        await coordinator.until(lambda: coordinator.updates)


async def test_a_version_that_was_not_offered_is_refused(
    silent_coordinator: FakeCoordinator, make_fleet: Callable[[FakeCoordinator], Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon logs it, waits as for any mismatch, and retries."""
    coordinator, fleet = silent_coordinator, make_fleet(silent_coordinator)
    real = coordinator.Register

    async def newer(request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        response = await real(request, context)
        response.protocol = 99 if len(coordinator.calls["Register"]) == 1 else 1
        return response

    monkeypatch.setattr(coordinator, "Register", newer)
    with capture_logs() as logs:
        async with coordinator.serving(), fleet.daemon():
            await coordinator.until(lambda: coordinator.calls["Attend"])
    (line,) = [line for line in logs if line["event"] == "refused"]
    assert line["reason"] == "expected protocol 1 to 1, got 99"


async def test_only_requested_outcomes_are_used(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """An outcome of a run that the registration did not name changes nothing."""
    coordinator.outcomes.append(training_pb2.Outcome(key=training_pb2.ExchangeKey(run_id="other"), counted=True))
    coordinator.ended_runs.append("another")
    with capture_logs() as logs:
        async with fleet.daemon():
            await coordinator.until(lambda: coordinator.calls["Attend"])
    assert not [line for line in logs if line["event"] in ("outcome", "run_ended")]


def test_a_limit_on_chunks_is_not_taken_below_the_smallest() -> None:
    """Chunks of one byte would be a message for each byte of the model."""
    limits = pb.Limits(max_chunk_bytes=1, chunk_bytes=1 << 30)
    session = session_of(pb.RegisterResponse(session_id="s", limits=limits), NO_CONNECTION)
    assert (session.chunk_bytes, session.max_chunk_bytes) == (MIN_CHUNK_BYTES, MIN_CHUNK_BYTES)


@pytest.mark.slow
async def test_an_update_is_sent_in_a_bounded_number_of_chunks() -> None:
    """If chunks of one byte are requested, the daemon uses larger ones, to stay within the limit of their number."""
    size = 4 * MAX_CHUNKS
    header = training_pb2.UpdateHeader(size_bytes=size)

    update = PendingUpdate(header, lambda offset, length: bytes(length))
    disk = DiskThread()
    upload = Upload(update, disk, Backoff(RetryDelays()), Mock())
    parts = [part async for part in upload._parts(Session("s", NO_CONNECTION, 1, MIN_CHUNK_BYTES))]
    await disk.close()
    assert len(parts) == MAX_CHUNKS + 2


# Time.


@pytest.mark.parametrize(
    ("deadline", "seconds"),
    [
        (None, 1000.0),
        ({"seconds": -1}, 1000.0),
        ({"seconds": 2**60}, 1000.0),
        ({"seconds": 0}, 1.0),
        ({"seconds": 100}, 111.0),
        ({"seconds": 999}, 1000.0),
    ],
)
def test_a_deadline_is_kept_with_a_little_grace_and_never_beyond_the_owners_limit(
    deadline: dict[str, int] | None, seconds: float
) -> None:
    """Missing, negative and absurd deadlines are replaced by the owner's limit."""
    assert seconds_for(training_pb2.Assignment(deadline=deadline), 1000.0) == seconds


async def test_a_clock_stands_still_while_the_coordinator_is_not_attended() -> None:
    """A coordinator that is down stops its deadlines, and so does the daemon."""
    timer, passed = DeadlineTimer(0.0, running=False), []

    async def work() -> None:
        async with timer:
            await asyncio.sleep(0.02)
            passed.append(True)
            timer.set_running(True)
            await asyncio.Event().wait()

    with pytest.raises(WorkFailed, match="the deadline is over"):
        await work()
    assert passed


async def test_a_repeat_gives_new_time() -> None:
    """The coordinator's next attempt continues the same work: the earlier deadline does not end it."""
    timer = DeadlineTimer(0.01, running=True)
    began = asyncio.get_running_loop().time()
    async with timer:
        timer.restart(1000.0)
        await asyncio.sleep(0.03)
    assert asyncio.get_running_loop().time() - began >= 0.03


async def test_training_that_passes_its_deadline_is_reported(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """Eight million steps are ended by the deadline, and the next assignment is executed."""
    assignment = coordinator.assignment(0, local_steps=1 << 23)
    assignment.deadline.FromMilliseconds(1)
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=assignment)
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    (failure,) = coordinator.calls["ReportStatus"][0].failures
    assert (failure.reason, failure.message[:20]) == (pb.FAILURE_REASON_RESOURCES, "the deadline is over")


async def test_computing_longer_than_the_owner_allows_is_reported(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """With any deadline, and also while the coordinator is down."""
    async with fleet.daemon(limits={"max_seconds": 0.05}):
        coordinator.assign(coordinator.assignment(0, local_steps=1 << 23))
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
    assert coordinator.calls["ReportStatus"][0].failures[0].reason == pb.FAILURE_REASON_RESOURCES


async def test_a_function_that_computes_too_long_is_stopped() -> None:
    """At its next check. The thread is free again."""
    worker = Worker(1)

    def endless(check: Callable[[], None]) -> None:
        while True:
            check()

    with pytest.raises(TimeoutError):
        await worker.run(endless, 0.02)
    assert await worker.shut_down(10)


async def test_nothing_waits_in_the_queue_of_the_thread() -> None:
    """Calls that are cancelled while the thread computes leave nothing in its queue."""
    worker, began = Worker(1), threading.Event()

    def endless(check: Callable[[], None]) -> None:
        began.set()
        try:
            while True:
                check()
        except Interrupted:
            return

    first = asyncio.create_task(worker.run(endless))
    await asyncio.to_thread(began.wait)
    others = [asyncio.create_task(worker.run(lambda check: None)) for _ in range(20)]
    await asyncio.sleep(0)
    assert isinstance(worker._executor, ThreadPoolExecutor)
    assert worker._executor._work_queue.qsize() == 0
    for task in (*others, first):
        task.cancel()
    await asyncio.gather(*others, first, return_exceptions=True)
    assert await worker.shut_down(10)


# FailureReports.


class Reported(GrpcTransport):
    """A connection that records the reports."""

    def __init__(self) -> None:
        self.requests: list[pb.ReportStatusRequest] = []

    async def call(self, request: Any, response: Any, service: str = "") -> Any:
        self.requests.append(request)
        return response()


async def test_failures_are_reported_together_and_in_limited_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand that wait for a session the last 256 are reported, 64 per call."""
    link, connection = Link(RetryDelays()), Reported()
    available = SimpleNamespace(availability=pb.Availability(may_train=True))
    waiting = FailureReports(link, cast(AvailabilityMonitor, available))
    for number in range(1000):
        waiting.add(("run", number, 0), b"work", WorkFailed(pb.FAILURE_REASON_LAYOUT, "x" * 5000))
    assert waiting.is_waiting(("run", 999, 0), b"work")
    assert not waiting.is_waiting(("run", 999, 0), b"other work")
    sending = asyncio.create_task(waiting.run())
    link.open(Session("s", connection, 1, 1))
    while waiting.is_waiting(("run", 999, 0), b"work"):
        await asyncio.sleep(0.001)
    sending.cancel()
    reported = [failure.key.round for request in connection.requests for failure in request.failures]
    assert reported == list(range(1000 - reports.MAX_WAITING, 1000))
    assert {len(request.failures) for request in connection.requests} == {reports.MAX_PER_CALL}
    assert len(connection.requests[0].failures[0].message) <= 1000


# Disk.


@pytest.mark.parametrize("limits", [StorageLimits(2, 1 << 20), StorageLimits(16, 400)], ids=["runs", "bytes"])
def test_a_state_beyond_the_limits_is_refused_and_none_is_lost(tmp_path: Path, limits: StorageLimits) -> None:
    """The third run's update is refused. Those of the first two stay, because their outcome may still arrive."""
    storage = storages.storage(tmp_path)
    storage._limits = limits
    kept, refused = [], []
    for number in range(8):
        try:
            storage.save(storages.update(0, run_id=f"run-{number}"), storages.leaves(0))
            kept.append(f"run-{number}")
        except WorkFailed as error:
            refused.append((error.reason, "this device's owner allows" in str(error)))
    assert 1 <= len(kept) < 8
    assert set(refused) == {(pb.FAILURE_REASON_RESOURCES, True)}
    assert [state.run_id for state in storage.held_states()] == sorted(kept)
    storage.end_run(kept[0])
    storage.save(storages.update(0, run_id="run-9"), storages.leaves(0))


def test_of_one_run_only_the_latest_updates_are_kept(tmp_path: Path) -> None:
    """Rounds that count down would leave a file each: the oldest are removed, with a line in the log."""
    storage = storages.storage(tmp_path)
    with capture_logs() as logs:
        for number in range(40, 20, -1):
            storage.save(storages.update(number), storages.leaves(number))
    assert len(storage.pending_keys()) == 9
    assert [line["round"] for line in logs if line["event"] == "update_given_up"] == list(range(40, 29, -1))


# The log.


def test_an_event_that_is_logged_too_often_is_dropped_and_counted() -> None:
    """Two lines of each event pass. The next line has the number of dropped ones."""
    limit = LogRate(1e-9, 2)
    kept = []
    for event in ("notice", "notice", "notice", "notice", "outcome"):
        try:
            kept.append(limit(None, "info", {"event": event})["event"])
        except structlog.DropEvent:
            continue
    assert kept == ["notice", "notice", "outcome"]
    limit._limiters["notice"]._bucket.fill()
    assert limit(None, "info", {"event": "notice"}) == {"event": "notice", "lines_dropped": 2}


async def test_a_refusal_is_waited_out_longer_each_time(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """A ban is retried after 0.05 s, then after twice as long each time. Work continues once it ends."""
    coordinator.faults["Register"] += [errors_pb2.NotAllowed()] * 3
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    with capture_logs() as logs:
        async with fleet.daemon():
            await coordinator.until(lambda: coordinator.updates)
    waits = [line["next_try_seconds"] for line in logs if line["event"] == "disconnected"]
    assert len(waits) == 3
    assert len([line for line in logs if line["event"] == "refused"]) == 3
