"""Cut links, damaged bytes, restarts on either side: the same update, and nothing is trained or sent twice."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from fl_client.updates import PendingUpdates
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, training_pb2

# 100 numbers and a count: 408 bytes, seven chunks of 64 bytes up or down.
SIZE = 100


def model_offsets(coordinator, assignment):
    """Offsets at which the model of an assignment was asked for."""
    digest = assignment.resources[0].digest
    return [request.offset for request in coordinator.calls["FetchModel"] if request.digest == digest]


async def test_a_fetch_goes_on_where_it_was_cut(fleet, coordinator):
    """Cut after two chunks of 64 bytes, then after three: the next requests start at 128 and 320."""
    fleet.task.size = SIZE
    coordinator.faults["cut_fetch"] += [2, 3]
    assignment = coordinator.assignment(size=SIZE)
    coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    assert model_offsets(coordinator, assignment) == [0, 128, 320]


async def test_a_damaged_chunk_is_asked_for_again(fleet, coordinator):
    """The third chunk's checksum is wrong once: the fetch goes on at 128."""
    fleet.task.size = SIZE
    coordinator.faults["damage_fetch"].append(2)
    assignment = coordinator.assignment(size=SIZE)
    coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    assert model_offsets(coordinator, assignment) == [0, 128]


async def test_bytes_of_another_digest_are_refused(fleet, coordinator):
    """A bundle whose bytes are not the ones that were named is fetched three times, then reported."""
    assignment = coordinator.assignment()
    resource, layout, data = coordinator.bundles[assignment.resources[0].digest.value]
    coordinator.bundles[resource.digest.value] = (resource, layout, data[:-1] + b"\x01")
    coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
    assert model_offsets(coordinator, assignment) == [0, 0, 0]
    assert coordinator.calls["ReportStatus"][0].failures[0].reason == pb.FAILURE_REASON_RESOURCES


async def test_a_resource_that_is_gone_drops_the_work(fleet, coordinator):
    """UnknownResource means that another assignment will come: nothing is reported, the next one is done."""
    coordinator.faults["Fetch"].append(errors_pb2.UnknownResource())
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0))
        await coordinator.until(lambda: coordinator.calls["FetchModel"])
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert not [status for status in coordinator.calls["ReportStatus"] if status.failures]


async def test_an_upload_goes_on_where_it_was_cut(fleet, coordinator):
    """Cut after three chunks of 64 bytes: the second header resumes at 192, and the bytes are whole."""
    fleet.task.size = SIZE
    coordinator.faults["cut_upload"].append(3)
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment(size=SIZE)))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    assert [header.resume_offset for header in coordinator.calls["SubmitUpdate"]] == [0, 192]
    header, data = coordinator.updates[0]
    assert len(data) == header.size_bytes


async def test_a_broken_upload_is_queried_and_resumed(fleet, coordinator):
    """DATA_LOSS with BrokenUpload is not the end: the daemon asks what was kept, as it did not before its first try."""
    coordinator.faults["SubmitUpdate"].append(errors_pb2.BrokenUpload())
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    assert (len(coordinator.calls["SubmitUpdate"]), len(coordinator.calls["QueryUpload"])) == (2, 1)


async def test_an_upload_that_never_will_be_taken_is_dropped(fleet, coordinator):
    """INVALID_ARGUMENT ends the work and its file; the daemon does the next assignment."""
    coordinator.faults["SubmitUpdate"].append(errors_pb2.InvalidField(field="header"))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0))
        await coordinator.until(lambda: coordinator.calls["SubmitUpdate"])
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert PendingUpdates(fleet.folder / "pending").unsettled() == [coordinator.updates[1][0].key]


async def test_a_late_update_is_dropped(fleet, coordinator):
    """Told that it came too late, the daemon has nothing left of it on disk, and does the next one."""
    coordinator.faults["refuse"].append(training_pb2.REFUSAL_REASON_LATE)
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0))
        async with asyncio.timeout(20):
            while not daemon.count("updates_total", result="refused"):
                await asyncio.sleep(0.001)
        assert PendingUpdates(fleet.folder / "pending").unsettled() == []
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert PendingUpdates(fleet.folder / "pending").unsettled() == [coordinator.updates[1][0].key]


async def test_a_restarted_coordinator_gets_the_same_work(silent_coordinator, make_fleet):
    """The coordinator goes away in mid-training and comes back without the session: one training, one update."""
    coordinator, fleet = silent_coordinator, make_fleet(silent_coordinator)
    assignment = coordinator.assignment(local_steps=400)
    async with coordinator.serving():
        context = fleet.daemon()
        daemon = await context.__aenter__()
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(assignment)
        await asyncio.to_thread(fleet.task.started.wait)
    coordinator.faults["Attend"].append(errors_pb2.UnknownSession())
    async with coordinator.serving():
        await coordinator.until(lambda: coordinator.updates)
        await context.__aexit__(None, None, None)
    assert len(coordinator.calls["Register"]) == 2
    assert (fleet.task.steps, daemon.count("rounds_trained_total")) == (400, 1)


async def test_a_repeat_of_an_assignment_is_the_same_work(fleet, coordinator):
    """Pushed three times with other attempts and deadlines, it is trained once."""
    assignment = coordinator.assignment(local_steps=300)
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        for attempt in range(3):
            assignment.attempt = attempt
            assignment.deadline.seconds = attempt
            coordinator.push(assignment=assignment)
        await coordinator.until(lambda: coordinator.updates)
    assert fleet.task.steps == 300


async def test_a_restarted_daemon_sends_the_same_bytes(fleet, coordinator):
    """Ended before its receipt, the daemon asks after its restart, sends the kept update and does not train again."""
    coordinator.faults["SubmitUpdate"] += [errors_pb2.RetryLater(wait={"seconds": 3600})]
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["SubmitUpdate"])
    first = coordinator.calls["SubmitUpdate"][0].digest
    async with fleet.daemon() as second:
        await coordinator.until(lambda: coordinator.updates)
    assert list(coordinator.calls["Register"][1].pending) == [coordinator.updates[0][0].key]
    assert (coordinator.updates[0][0].digest, second.count("rounds_trained_total")) == (first, 0)
    assert [query.digest for query in coordinator.calls["QueryUpload"]] == [first]


async def test_training_again_gives_the_same_bits(fleet, coordinator):
    """Without the kept file, a second daemon computes the update of the first one, bit for bit."""
    assignment = coordinator.assignment(local_steps=7)
    coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    _, first = coordinator.updates.pop(0)
    coordinator.receipts.clear()
    coordinator.kept.clear()
    PendingUpdates(fleet.folder / "pending").drop(("run", 0, 0))
    coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
    async with fleet.daemon() as second:
        await coordinator.until(lambda: coordinator.updates)
    assert second.count("rounds_trained_total") == 1
    assert coordinator.updates[0][1] == first


@pytest.mark.parametrize("counted", [True, False])
async def test_an_outcome_settles_the_kept_update(fleet, coordinator, counted):
    """Kept until the outcome, whichever it is; a next start has nothing pending."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(0))
        await coordinator.until(lambda: coordinator.updates)
        assert PendingUpdates(fleet.folder / "pending").unsettled() == [coordinator.updates[0][0].key]
        coordinator.push(outcome=training_pb2.Outcome(key=coordinator.updates[0][0].key, counted=counted))
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert PendingUpdates(fleet.folder / "pending").unsettled() == [coordinator.updates[1][0].key]


async def test_the_retry_window_of_a_stream_is_kept(fleet, coordinator):
    """Told to come back after an hour, the daemon waits for an hour."""
    with capture_logs() as logs:
        async with fleet.daemon() as daemon:
            await coordinator.until(lambda: coordinator.calls["Attend"])
            coordinator.push(retry=pb.RetryWindow(wait={"seconds": 3600}, reason="upgrade"))
            coordinator.hang_up()
            await daemon.until(lambda: daemon.count("connection_attempts_total", result="failed"))
    (line,) = [line for line in logs if line["event"] == "disconnected"]
    assert (line["next_try_seconds"], line["reason"]) == (3600, "upgrade")
