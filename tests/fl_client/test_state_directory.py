"""A state directory that vanishes, is full or read-only while the daemon runs: made again, or the device steps back."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from structlog.typing import EventDict

from fl_client.errors import StateError
from fl_client.storage.pending_updates import PendingUpdates
from fl_client.storage.state import StateDir
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator, key
from tests.fl_client.fleet import Fleet
from tests.fl_client.test_daemon_states import scaffold, work

OFTEN: dict[str, Any] = {"gates": {"check_s": 0.02}}
SELDOM: dict[str, Any] = {"gates": {"check_s": 3600}}
MEBIBYTE = 1 << 20
NUMBERS = MEBIBYTE // 4
"""float32 numbers of 1 MiB."""


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """The logged lines."""
    with capture_logs() as lines:
        yield lines


@pytest.fixture
def disk(fleet: Fleet) -> Iterator[Path]:
    """The state directory as a disk of 8 MiB that can be filled and remounted."""
    fleet.folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", fleet.folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield fleet.folder
    while fleet.folder.is_mount():
        subprocess.run(["umount", fleet.folder], check=True)


def large(coordinator: FakeCoordinator, round_number: int) -> training_pb2.Assignment:
    """An assignment of SCAFFOLD with a model of 1 MiB."""
    made = coordinator.assignment(round_number, algorithm="scaffold", size=NUMBERS)
    c = {"w": torch.zeros(NUMBERS)}
    made.resources.append(coordinator.publish(tensor_pb2.RESOURCE_KIND_DIRECTION, c, {"w"}))
    return made


def make_read_only(disk: Path) -> None:
    """Cover a disk by a read-only view of itself; `umount` removes it. A disk with open files cannot be remounted."""
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)


def availability(coordinator: FakeCoordinator) -> list[pb.Availability]:
    """The reported availabilities, the registrations included."""
    reports = [*coordinator.calls["Register"], *coordinator.calls["ReportStatus"]]
    return [report.availability for report in reports if report.HasField("availability")]


def named(logs: list[EventDict], event: str) -> list[EventDict]:
    """The lines of an event."""
    return [line for line in logs if line["event"] == event]


async def test_a_deleted_directory_is_made_again_for_the_next_work(
    fleet: Fleet, coordinator: FakeCoordinator, logs: list[EventDict]
) -> None:
    """SCAFFOLD's update and next state are saved in the new directory, which this daemon holds."""
    async with fleet.daemon(**SELDOM):
        await work(coordinator, scaffold(coordinator, 0))
        shutil.rmtree(fleet.folder)
        await work(coordinator, scaffold(coordinator, 1))
        assert PendingUpdates(fleet.folder / "pending").exchange_keys() == [key(1)]
        with pytest.raises(StateError, match="held by another daemon"):
            StateDir(fleet.folder).__enter__()
    assert not [status for status in coordinator.calls["ReportStatus"] if status.failures]
    (line,) = named(logs, "state_dir_made_again")
    assert line["path"] == str(fleet.folder)


async def test_a_directory_deleted_in_mid_training_costs_no_update(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """The update of the current training arrives, and is in the new directory."""
    fleet.task.block = threading.Event()
    async with fleet.daemon(**SELDOM):
        await coordinator.until_called("Attend")
        coordinator.assign(scaffold(coordinator, 0))
        await asyncio.to_thread(fleet.task.started.wait)
        shutil.rmtree(fleet.folder)
        fleet.task.block.set()
        await coordinator.until(lambda: coordinator.updates)
        assert PendingUpdates(fleet.folder / "pending").exchange_keys() == [key(0)]


async def test_a_deleted_directory_is_made_again_without_work(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """An idle daemon finds it by itself."""
    async with fleet.daemon(**OFTEN) as daemon:
        await coordinator.until_called("Attend")
        shutil.rmtree(fleet.folder.rename(fleet.folder.with_name("gone")))
        await daemon.until(lambda: (fleet.folder / "states").is_dir() and daemon.count("state_dir_usable") == 1)


async def test_a_device_steps_back_while_its_directory_cannot_be_made(
    fleet: Fleet, coordinator: FakeCoordinator, logs: list[EventDict]
) -> None:
    """A file is in its place: the coordinator gets the reason. Without the file the device trains again."""
    async with fleet.daemon(**OFTEN) as daemon:
        await coordinator.until_called("Attend")
        gone = fleet.folder.rename(fleet.folder.with_name("gone"))  # at once: the daemon may be writing a file
        fleet.folder.touch()
        shutil.rmtree(gone)
        await coordinator.until(lambda: not availability(coordinator)[-1].may_train)
        assert availability(coordinator)[-1].reason == pb.UNAVAILABLE_REASON_RESOURCES
        assert availability(coordinator)[-1].detail.startswith("state_dir: ")
        assert (daemon.count("state_dir_usable"), daemon.count("may_train")) == (0, 0)
        fleet.folder.unlink()
        await coordinator.until(lambda: availability(coordinator)[-1].may_train)
        assert (daemon.count("state_dir_usable"), daemon.count("may_train")) == (1, 1)
        await work(coordinator, scaffold(coordinator, 0))
    assert [line["log_level"] for line in named(logs, "state_dir_unusable")] == ["error"]
    assert len(named(logs, "state_dir_usable")) == 1


async def test_a_device_with_a_full_disk_steps_back_until_an_update_fits(
    fleet: Fleet, coordinator: FakeCoordinator, disk: Path
) -> None:
    """6 of 8 MiB are used, and SCAFFOLD needs 3 MiB. The first assignment fails, no other one is taken.

    A small file could still be written, so only the room for a whole update shows that the disk is usable.
    """
    fleet.task.size, coordinator.chunk_bytes = NUMBERS, MEBIBYTE
    async with fleet.daemon(**OFTEN):
        await coordinator.until_called("Attend")
        (disk / "other").write_bytes(bytes(6 * MEBIBYTE))
        coordinator.push(assignment=large(coordinator, 0))
        await coordinator.until(lambda: any(status.failures for status in coordinator.calls["ReportStatus"]))
        (status,) = [status for status in coordinator.calls["ReportStatus"] if status.failures]
        assert [failure.reason for failure in status.failures] == [pb.FAILURE_REASON_RESOURCES]
        assert not status.availability.may_train
        assert "No space left" in status.availability.detail
        (disk / "other").unlink()
        await coordinator.until(lambda: availability(coordinator)[-1].may_train)
        await work(coordinator, large(coordinator, 1))


async def test_a_device_with_a_read_only_disk_steps_back(
    fleet: Fleet, coordinator: FakeCoordinator, disk: Path
) -> None:
    """The disk becomes read-only, as after an error, and later writable again: the device is away in between."""
    async with fleet.daemon(**OFTEN):
        await coordinator.until_called("Attend")
        await asyncio.to_thread(make_read_only, disk)
        await coordinator.until(lambda: not availability(coordinator)[-1].may_train)
        assert "Read-only file system" in availability(coordinator)[-1].detail
        await asyncio.to_thread(subprocess.run, ["umount", str(disk)], check=True)
        await coordinator.until(lambda: availability(coordinator)[-1].may_train)
        await work(coordinator, scaffold(coordinator, 0))


async def test_work_that_crosses_the_report_is_answered_with_the_availability(
    fleet: Fleet, coordinator: FakeCoordinator
) -> None:
    """An assignment that arrives in a device that has stepped back fails as STOPPED, and says that it may not train."""
    async with fleet.daemon(**OFTEN):
        await coordinator.until_called("Attend")
        gone = fleet.folder.rename(fleet.folder.with_name("gone"))  # at once: the daemon may be writing a file
        fleet.folder.touch()
        shutil.rmtree(gone)
        await coordinator.until(lambda: not availability(coordinator)[-1].may_train)
        coordinator.push(assignment=coordinator.assignment())
        await coordinator.until(lambda: any(status.failures for status in coordinator.calls["ReportStatus"]))
        fleet.folder.unlink()
    status = next(status for status in coordinator.calls["ReportStatus"] if status.failures)
    assert status.failures[0].reason in (pb.FAILURE_REASON_STOPPED, pb.FAILURE_REASON_RESOURCES)
    assert not status.availability.may_train
