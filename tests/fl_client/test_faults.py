"""After cut links, damaged bytes and restarts on either side the update is the same, and nothing is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from fl_client.storage.pending_updates import PendingUpdates
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, training_pb2
from tests.fl_client.fake_coordinator import TIMEOUT_S, FakeCoordinator
from tests.fl_client.fleet import Fleet

# 100 numbers and a count: 408 bytes, seven chunks of 64 bytes up or down.
SIZE = 100


def model_offsets(coordinator: FakeCoordinator, assignment: training_pb2.Assignment) -> list[int]:
    """Offsets at which the model of an assignment was asked for."""
    digest = assignment.resources[0].digest
    return [request.offset for request in coordinator.calls["FetchModel"] if request.digest == digest]


async def test_a_fetch_resumes_where_it_was_cut(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """Cut after two chunks of 64 bytes, then after three: the next requests start at 128 and 320."""
    fleet.task.size = SIZE
    coordinator.faults["cut_fetch"] += [2, 3]
    assignment = coordinator.assignment(size=SIZE)
    coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    assert model_offsets(coordinator, assignment) == [0, 128, 320]


async def test_a_damaged_chunk_is_requested_again(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """The third chunk's checksum is wrong once: the fetch goes on at 128."""
    fleet.task.size = SIZE
    coordinator.faults["damage_fetch"].append(2)
    assignment = coordinator.assignment(size=SIZE)
    coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    assert model_offsets(coordinator, assignment) == [0, 128]


async def test_bytes_of_another_digest_are_refused(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """A bundle with a wrong digest is fetched three times, then reported."""
    assignment = coordinator.assignment()
    resource, layout, data = coordinator.bundles[assignment.resources[0].digest.value]
    coordinator.bundles[resource.digest.value] = (resource, layout, data[:-1] + b"\x01")
    coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
    assert model_offsets(coordinator, assignment) == [0, 0, 0]
    assert coordinator.calls["ReportStatus"][0].failures[0].reason == pb.FAILURE_REASON_RESOURCES


async def test_a_removed_resource_drops_the_work(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """UnknownResource means that another assignment will come: nothing is reported, the next one is done."""
    coordinator.faults["Fetch"].append(errors_pb2.UnknownResource())
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0))
        await coordinator.until(lambda: coordinator.calls["FetchModel"])
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert not [status for status in coordinator.calls["ReportStatus"] if status.failures]


async def test_an_upload_resumes_where_it_was_cut(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """Cut after three chunks of 64 bytes: the second header resumes at 192, and the bytes are whole."""
    fleet.task.size = SIZE
    coordinator.faults["cut_upload"].append(3)
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment(size=SIZE)))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    assert [header.resume_offset for header in coordinator.calls["SubmitUpdate"]] == [0, 192]
    header, data = coordinator.updates[0]
    assert len(data) == header.size_bytes


async def test_a_broken_upload_is_queried_and_resumed(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """After DATA_LOSS with BrokenUpload the daemon queries the received bytes and resumes."""
    coordinator.faults["SubmitUpdate"].append(errors_pb2.BrokenUpload())
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)
    assert (len(coordinator.calls["SubmitUpdate"]), len(coordinator.calls["QueryUpload"])) == (2, 1)


async def test_a_permanently_refused_upload_is_dropped(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """INVALID_ARGUMENT ends the work and its file; the daemon does the next assignment."""
    coordinator.faults["SubmitUpdate"].append(errors_pb2.InvalidField(field="header"))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0))
        await coordinator.until(lambda: coordinator.calls["SubmitUpdate"])
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert PendingUpdates(fleet.folder / "pending").exchange_keys() == [coordinator.updates[1][0].key]


async def test_a_late_update_is_dropped(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """After the refusal as late the daemon removes the update from disk and does the next assignment."""
    coordinator.faults["refuse"].append(training_pb2.REFUSAL_REASON_LATE)
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0))
        async with asyncio.timeout(TIMEOUT_S):
            while not daemon.count("updates_total", result="refused"):
                await asyncio.sleep(0.001)
        assert PendingUpdates(fleet.folder / "pending").exchange_keys() == []
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert PendingUpdates(fleet.folder / "pending").exchange_keys() == [coordinator.updates[1][0].key]


async def test_a_restarted_coordinator_gets_the_same_work(
    silent_coordinator: FakeCoordinator, make_fleet: Callable[[FakeCoordinator], Fleet]
) -> None:
    """The coordinator restarts during training without the session. There is one training and one update."""
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


async def test_a_repeat_of_an_assignment_is_the_same_work(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """An assignment pushed three times with other attempts and deadlines is trained once."""
    assignment = coordinator.assignment(local_steps=300)
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        for attempt in range(3):
            assignment.attempt = attempt
            assignment.deadline.seconds = attempt
            coordinator.push(assignment=assignment)
        await coordinator.until(lambda: coordinator.updates)
    assert fleet.task.steps == 300


async def test_a_restarted_daemon_sends_the_same_bytes(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """A daemon that ends before its receipt sends the stored update after its restart and does not train again."""
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


async def test_a_second_training_gives_the_same_bits(fleet: Fleet, coordinator: FakeCoordinator) -> None:
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
async def test_an_outcome_settles_the_kept_update(fleet: Fleet, coordinator: FakeCoordinator, counted: bool) -> None:
    """The update is kept until any outcome. The next start has nothing pending."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(0))
        await coordinator.until(lambda: coordinator.updates)
        assert PendingUpdates(fleet.folder / "pending").exchange_keys() == [coordinator.updates[0][0].key]
        coordinator.push(outcome=training_pb2.Outcome(key=coordinator.updates[0][0].key, counted=counted))
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    assert PendingUpdates(fleet.folder / "pending").exchange_keys() == [coordinator.updates[1][0].key]


async def test_the_retry_window_of_a_stream_is_kept(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """For a retry time of an hour the daemon waits an hour."""
    with capture_logs() as logs:
        async with fleet.daemon() as daemon:
            await coordinator.until(lambda: coordinator.calls["Attend"])
            coordinator.push(retry=pb.RetryWindow(wait={"seconds": 3600}, reason="upgrade"))
            coordinator.hang_up()
            await daemon.until(lambda: daemon.count("connection_attempts_total", result="failed"))
    (line,) = [line for line in logs if line["event"] == "disconnected"]
    assert (line["next_try_seconds"], line["reason"]) == (3600, "upgrade")
