"""What a daemon holds its coordinator to, with a scripted one in this process."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import structlog
from structlog.testing import capture_logs

from fl_client import attendance, stream
from fl_client.assignments import reports
from fl_client.assignments.clock import Clock, seconds_for
from fl_client.assignments.reports import Reports
from fl_client.connection.sessions import SMALLEST_CHUNK_BYTES, session_of
from fl_client.errors import WorkFailed
from fl_client.link import Backoff, Link, Session, Waits
from fl_client.settings.log_rate import LogRate
from fl_client.storage.room import Room
from fl_client.training import Interrupted
from fl_client.uploads import MOST_CHUNKS, Upload
from fl_client.worker import Worker
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, training_pb2
from tests.fl_client import shelves

# Waits.


def test_waits_that_a_coordinator_asks_for_are_bounded():
    """From the daemon's own first wait to its longest they are kept; fewer count as none, more are cut."""
    backoff = Backoff(Waits(first=1.0, longest=8.0, most=60.0))
    assert [backoff.after(asked) for asked in (1.0, 59.5, 60.5, 2.0**60, math.inf)] == [1.0, 59.5, 60.0, 60.0, 60.0]
    assert 0.5 <= backoff.after(-5.0) <= 1.0
    assert 1.0 <= backoff.after(0.0) <= 2.0
    assert 2.0 <= backoff.after(None) <= 4.0


async def test_connections_are_made_at_a_bounded_rate(fleet, coordinator, monkeypatch):
    """A coordinator that greets and hangs up, again and again, is called three times at once and then now and then."""
    monkeypatch.setattr(attendance, "CONNECTS_AT_ONCE", 3)
    monkeypatch.setattr(attendance, "CONNECTS_PER_S", 0.001)
    with capture_logs() as logs:
        async with fleet.daemon() as daemon:
            for times in range(1, 5):
                await coordinator.until(lambda times=times: len(coordinator.calls["Attend"]) == times)
                coordinator.hang_up()
                await daemon.until(
                    lambda times=times: daemon.count("connection_attempts_total", result="failed") == times
                )
    waits = [line["next_try_seconds"] for line in logs if line["event"] == "disconnected"]
    assert [wait > 100 for wait in waits] == [False, False, False, True]


# The session.


async def test_a_stream_that_begins_otherwise_than_with_attached_is_left(silent_coordinator, make_fleet):
    """Nothing of it is done, and the daemon comes back."""
    coordinator, fleet = silent_coordinator, make_fleet(silent_coordinator)
    real, rude = coordinator.Attend, [True]

    async def without_greeting(request, context):
        async for event in real(request, context):
            if not (rude and event.HasField("attached")):
                yield event

    coordinator.Attend = without_greeting
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    with capture_logs() as logs:
        async with coordinator.serving(), fleet.daemon() as daemon:
            await daemon.until(lambda: daemon.count("connection_attempts_total", result="failed"))
            assert not coordinator.calls["FetchModel"]
            rude.clear()
            await coordinator.until(lambda: coordinator.updates)
    assert "expected Attached as the first event, got assignment" in str(logs)


async def test_a_coordinator_that_greets_nobody_is_left(silent_coordinator, make_fleet, monkeypatch):
    """It lets the daemon attend and is silent: after a while the daemon tries anew."""
    monkeypatch.setattr(stream, "FIRST_WORD_S", 0.05)
    coordinator, fleet = silent_coordinator, make_fleet(silent_coordinator)
    real, silent = coordinator.Attend, [True]

    async def without_a_word(request, context):
        while silent:
            await asyncio.sleep(0.01)
        async for event in real(request, context):
            yield event

    coordinator.Attend = without_a_word
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    async with coordinator.serving(), fleet.daemon() as daemon:
        await daemon.until(lambda: daemon.count("connection_attempts_total", result="failed"))
        silent.clear()
        monkeypatch.undo()
        await coordinator.until(lambda: coordinator.updates)


async def test_a_version_that_was_not_offered_is_no_agreement(silent_coordinator, make_fleet):
    """The daemon says so, waits as for any mismatch, and comes back."""
    coordinator, fleet = silent_coordinator, make_fleet(silent_coordinator)
    real = coordinator.Register

    async def newer(request, context):
        response = await real(request, context)
        response.protocol = 99 if len(coordinator.calls["Register"]) == 1 else 1
        return response

    coordinator.Register = newer
    with capture_logs() as logs:
        async with coordinator.serving(), fleet.daemon():
            await coordinator.until(lambda: coordinator.calls["Attend"])
    (line,) = [line for line in logs if line["event"] == "refused"]
    assert line["reason"] == "expected protocol 1 to 1, got 99"


async def test_only_outcomes_that_were_asked_for_are_taken(fleet, coordinator):
    """A registration's answer about a run that the daemon named nothing of changes nothing."""
    coordinator.outcomes.append(training_pb2.Outcome(key=training_pb2.ExchangeKey(run_id="other"), counted=True))
    coordinator.ended_runs.append("another")
    with capture_logs() as logs:
        async with fleet.daemon():
            await coordinator.until(lambda: coordinator.calls["Attend"])
    assert not [line for line in logs if line["event"] in ("outcome", "run_ended")]


def test_a_limit_on_chunks_is_not_taken_below_the_smallest():
    """One byte a chunk would be a message for each byte of the model."""
    limits = pb.Limits(max_chunk_bytes=1, chunk_bytes=1 << 30)
    session = session_of(pb.RegisterResponse(session_id="s", limits=limits), None)
    assert (session.chunk_bytes, session.max_chunk_bytes) == (SMALLEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES)


async def test_an_update_goes_up_in_a_bounded_number_of_chunks():
    """Asked for chunks of one byte, the daemon makes them as long as it takes to need no more than so many."""
    size = 4 * MOST_CHUNKS
    header = training_pb2.UpdateHeader(size_bytes=size)

    class Memory:
        async def run(self, read, offset, length):
            return bytes(length)

    class Update:
        begun, read = False, None

    Update.header = header
    upload = Upload(Update, Memory(), Backoff(Waits()), lambda count: None)
    parts = [part async for part in upload._parts(Session("s", None, 1, SMALLEST_CHUNK_BYTES))]
    assert len(parts) == MOST_CHUNKS + 2


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
def test_a_deadline_is_kept_with_a_little_grace_and_never_beyond_the_owners_limit(deadline, seconds):
    """Missing, negative and absurd ones are the owner's limit."""
    assert seconds_for(training_pb2.Assignment(deadline=deadline), 1000.0) == seconds


async def test_a_clock_stands_still_while_the_coordinator_is_not_attended():
    """A coordinator that is down lets its deadlines stand still, and so does the daemon."""
    clock, passed = Clock(0.0, running=False), []

    async def work():
        async with clock:
            await asyncio.sleep(0.02)
            passed.append(True)
            clock.run(True)
            await asyncio.Event().wait()

    with pytest.raises(WorkFailed, match="the deadline is over"):
        await work()
    assert passed


async def test_a_repeat_gives_new_time():
    """The coordinator's next attempt goes on with the same work: the earlier deadline does not end it."""
    clock = Clock(0.01, running=True)
    async with clock:
        clock.give(1000.0)
        await asyncio.sleep(0.03)


async def test_training_that_passes_its_deadline_is_reported(fleet, coordinator):
    """Eight million steps are given up behind a deadline, and the next assignment is done."""
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


async def test_computing_longer_than_the_owner_allows_is_reported(fleet, coordinator):
    """Whatever the deadline, and also while the coordinator is away."""
    async with fleet.daemon(limits={"max_seconds": 0.05}):
        coordinator.assign(coordinator.assignment(0, local_steps=1 << 23))
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
    assert coordinator.calls["ReportStatus"][0].failures[0].reason == pb.FAILURE_REASON_RESOURCES


async def test_a_function_that_computes_too_long_is_stopped():
    """At its next check; the thread is free again."""
    worker = Worker(1)

    def endless(check):
        while True:
            check()

    with pytest.raises(TimeoutError):
        await worker.run(endless, 0.02)
    assert await worker.idle(10)


async def test_nothing_waits_in_the_queue_of_the_thread():
    """Calls that are cancelled while the thread computes leave nothing behind: what they hold is free at once."""
    worker, began = Worker(1), threading.Event()

    def endless(check):
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
    assert worker._executor._work_queue.qsize() == 0
    for task in (*others, first):
        task.cancel()
    await asyncio.gather(*others, first, return_exceptions=True)
    assert await worker.idle(10)


# Reports.


class Told:
    """A connection that keeps what is reported."""

    def __init__(self):
        self.requests = []

    async def report_status(self, request):
        self.requests.append(request)


async def test_failures_are_told_together_and_no_more_than_so_many(monkeypatch):
    """Of a thousand that wait for a session the last 256 are told, 64 in a call."""
    link, connection = Link(Waits()), Told()
    waiting = Reports(link, None)
    for number in range(1000):
        waiting.add(("run", number, 0), b"work", pb.FAILURE_REASON_LAYOUT, "x" * 5000)
    assert waiting.holds(("run", 999, 0), b"work")
    assert not waiting.holds(("run", 999, 0), b"other work")
    sending = asyncio.create_task(waiting.send())
    link.open(Session("s", connection, 1, 1))
    while waiting.holds(("run", 999, 0), b"work"):
        await asyncio.sleep(0.001)
    sending.cancel()
    told = [failure.key.round for request in connection.requests for failure in request.failures]
    assert told == list(range(1000 - reports.WAITING, 1000))
    assert {len(request.failures) for request in connection.requests} == {reports.IN_A_CALL}
    assert len(connection.requests[0].failures[0].message) <= 1000


# Disk.


@pytest.mark.parametrize("room", [Room(2, 1 << 20), Room(16, 400)], ids=["runs", "bytes"])
def test_a_state_that_there_is_no_room_for_is_refused_and_none_is_lost(tmp_path, room):
    """The third run's update is refused; those of the first two, whose outcome may yet come, stay."""
    shelf = shelves.shelf(tmp_path)
    shelf._room = room
    kept, refused = [], []
    for number in range(8):
        try:
            shelf.keep(shelves.update(0, run_id=f"run-{number}"), shelves.leaves(0))
            kept.append(f"run-{number}")
        except WorkFailed as error:
            refused.append((error.reason, "this device's owner allows" in str(error)))
    assert 1 <= len(kept) < 8
    assert set(refused) == {(pb.FAILURE_REASON_RESOURCES, True)}
    assert [state.run_id for state in shelf.held()] == sorted(kept)
    shelf.end(kept[0])
    shelf.keep(shelves.update(0, run_id="run-9"), shelves.leaves(0))


def test_of_one_run_only_the_latest_updates_are_kept(tmp_path):
    """Rounds that count down would leave a file each: the oldest are given up, with a line in the log."""
    shelf = shelves.shelf(tmp_path)
    with capture_logs() as logs:
        for number in range(40, 20, -1):
            shelf.keep(shelves.update(number), shelves.leaves(number))
    assert len(shelf.unsettled()) == 9
    assert [line["round"] for line in logs if line["event"] == "update_given_up"] == list(range(40, 29, -1))


# The log.


def test_an_event_that_is_logged_too_often_is_dropped_and_counted():
    """Two lines of each event, others not at all; what is missing stands in the next line."""
    limit = LogRate(1e-9, 2)
    kept = []
    for event in ("notice", "notice", "notice", "notice", "outcome"):
        try:
            kept.append(limit(None, "info", {"event": event})["event"])
        except structlog.DropEvent:
            continue
    assert kept == ["notice", "notice", "outcome"]
    limit._paces["notice"]._due = 0.0
    assert limit(None, "info", {"event": "notice"}) == {"event": "notice", "lines_dropped": 2}


async def test_a_refusal_is_waited_out_longer_each_time(fleet, coordinator):
    """A ban: 0.05 s at first, then twice as long each time, and work is done when it ends."""
    coordinator.faults["Register"] += [errors_pb2.NotAllowed()] * 3
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    with capture_logs() as logs:
        async with fleet.daemon():
            await coordinator.until(lambda: coordinator.updates)
    waits = [line["next_try_seconds"] for line in logs if line["event"] == "disconnected"]
    assert len(waits) == 3
    assert len([line for line in logs if line["event"] == "refused"]) == 3
