"""A whole daemon and a method with client states: SCAFFOLD, from round to round.

The gradient is -10 at w = 0 and the rate 0.01; every round here starts from w = 0 with c = 4 and makes one step.
Without a state delta = -0.01 * (-10 - 0 + 4) = 0.06, and c_i becomes 0 - 4 - 0.06 / 0.01 = -10, the gradient seen.
"""

from __future__ import annotations

from collections.abc import Callable
from errno import ENOSPC
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from fl_client.storage.device_storage import DeviceStorage
from fl_client.storage.pending_updates import key_of
from protos import codec
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator
from tests.fl_client.fleet import Fleet


def scaffold(
    coordinator: FakeCoordinator, round_number: int, counted: training_pb2.Outcome | None = None, **changes: Any
) -> training_pb2.Assignment:
    """An assignment of SCAFFOLD."""
    made = coordinator.assignment(round_number, algorithm="scaffold", counted=counted, **changes)
    c = coordinator.publish(tensor_pb2.RESOURCE_KIND_DIRECTION, {"w": torch.tensor([4.0])}, {"w"})
    made.resources.append(c)
    return made


def delta(coordinator: FakeCoordinator, round_number: int) -> float:
    """The received delta of a round."""
    header, data = coordinator.updates[round_number]
    layout = codec.Layout.from_manifest(header.payloads[0].manifest, 1 << 20)
    return codec.unpack(data, layout)["w"].item()


def outcome(coordinator: FakeCoordinator, round_number: int, **changes: Any) -> training_pb2.Outcome:
    """An outcome: the update of a round counted completely."""
    header, _ = coordinator.updates[round_number]
    values = {"key": header.key, "digest": header.digest, "counted": True, "clip_factor": 1.0}
    return training_pb2.Outcome(**{**values, **changes})


async def work(coordinator: FakeCoordinator, assignment: training_pb2.Assignment) -> None:
    """Push an assignment and wait for its update."""
    await coordinator.until(lambda: coordinator.calls["Attend"])
    coordinator.assign(assignment)
    await coordinator.until(lambda: assignment.key.round in coordinator.updates)


def storage(fleet: Fleet) -> DeviceStorage:
    """The content of the daemon's state directory."""
    return DeviceStorage(fleet.folder / "pending", fleet.folder / "states")


async def test_a_round_that_counted_changes_the_next_one(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """With c_i = -10 the step is along -10 + 10 + 4 = 4, so delta = -0.04."""
    async with fleet.daemon():
        await work(coordinator, scaffold(coordinator, 0))
        coordinator.push(outcome=outcome(coordinator, 0))
        await work(coordinator, scaffold(coordinator, 1, outcome(coordinator, 0)))
    assert delta(coordinator, 0) == pytest.approx(0.06)
    assert delta(coordinator, 1) == pytest.approx(-0.04)


async def test_a_restarted_daemon_that_missed_the_outcome_has_its_state(
    fleet: Fleet, coordinator: FakeCoordinator
) -> None:
    """Clipped to a half, the delta leaves c_i = -4 - 3 = -7: the next step is along 1."""
    async with fleet.daemon():
        await work(coordinator, scaffold(coordinator, 0))
    async with fleet.daemon():
        await work(coordinator, scaffold(coordinator, 1, outcome(coordinator, 0, clip_factor=0.5)))
    assert delta(coordinator, 1) == pytest.approx(-0.01)


async def test_outcomes_of_a_registration_are_settled(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """The registration names run and key; its answer makes the state, and nothing is asked twice."""
    async with fleet.daemon():
        await work(coordinator, scaffold(coordinator, 0, state_epoch=2))
    coordinator.outcomes.append(outcome(coordinator, 0, state_epoch=2))
    async with fleet.daemon():
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
    second = coordinator.calls["Register"][1]
    assert list(second.states) == [pb.HeldState(run_id="run", state_epoch=2)]
    assert list(second.pending) == [coordinator.updates[0][0].key]
    assert (list(coordinator.calls["Attend"][1].pending), list(coordinator.calls["Attend"][1].states)) == (
        [],
        list(second.states),
    )
    assert storage(fleet).pending_keys() == []
    assert storage(fleet).held_states() == [pb.HeldState(run_id="run", state_epoch=2)]


async def test_a_round_that_did_not_count_leaves_the_state(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """Dropped: round 1 starts from nothing as round 0 did, and sends the same delta."""
    async with fleet.daemon():
        await work(coordinator, scaffold(coordinator, 0))
        coordinator.push(outcome=outcome(coordinator, 0, counted=False))
        await work(coordinator, scaffold(coordinator, 1))
    assert delta(coordinator, 1) == delta(coordinator, 0)


async def test_a_lost_state_is_reported(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """For a missing state the daemon reports STATE_LOST and starts without one in the next epoch."""
    lost = training_pb2.Outcome(
        key=training_pb2.ExchangeKey(run_id="run", round=3), digest=codec.digest_message(bytes(32)), counted=True
    )
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=scaffold(coordinator, 4, lost))
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
        await work(coordinator, scaffold(coordinator, 5, state_epoch=1))
    (failure,) = coordinator.calls["ReportStatus"][0].failures
    assert failure.reason == pb.FAILURE_REASON_STATE_LOST
    assert delta(coordinator, 5) == pytest.approx(0.06)


async def test_an_update_is_not_sent_without_its_state_on_disk(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full the daemon reports RESOURCES and sends nothing. An update without a state is sent."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fl_client.storage.disk.write_whole", full)
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=scaffold(coordinator, 0))
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
        await work(coordinator, coordinator.assignment(1))
    (failure,) = coordinator.calls["ReportStatus"][0].failures
    assert (failure.reason, list(coordinator.updates)) == (pb.FAILURE_REASON_RESOURCES, [1])


@pytest.mark.parametrize("way", ["stream", "start"])
async def test_the_end_of_a_run_removes_its_files(fleet: Fleet, coordinator: FakeCoordinator, way: str) -> None:
    """State and update of the run are removed, by an event, also where the daemon was away."""
    async with fleet.daemon():
        await work(coordinator, scaffold(coordinator, 0))
        await work(coordinator, scaffold(coordinator, 1, outcome(coordinator, 0)))
        if way == "stream":
            coordinator.push(run_ended=pb.RunEnded(run_id="run"))
            coordinator.push(run_ended=pb.RunEnded(run_id="another"))
            await work(coordinator, coordinator.assignment(2, key={"run_id": "next", "round": 2}))
    if way == "start":
        assert storage(fleet).held_states()
        coordinator.ended_runs.append("run")
        async with fleet.daemon() as daemon:
            await daemon.until(lambda: not storage(fleet).held_states())
    assert storage(fleet).held_states() == []
    assert [key_of(it) for it in storage(fleet).pending_keys()] == ([("next", 2, 0)] if way == "stream" else [])


@pytest.mark.parametrize("extended", [False, True])
async def test_what_a_full_disk_does_not_take_is_tried_again(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:
    """Outcomes and ends of runs come once. Files of a run that goes on, because an operator extends it, stay."""
    monkeypatch.setattr("fl_client.assignments.manager.FIRST_PAUSE_S", 0.05)
    full, settle, end_run = [True], DeviceStorage.settle, DeviceStorage.end_run

    def on_disk(change: Callable[[DeviceStorage, Any], None]) -> Callable[[DeviceStorage, Any], None]:
        def changing(kept: DeviceStorage, argument: Any) -> None:
            if full[0]:
                raise OSError(ENOSPC, "no space left on device")
            change(kept, argument)

        return changing

    monkeypatch.setattr(DeviceStorage, "settle", on_disk(settle))
    monkeypatch.setattr(DeviceStorage, "end_run", on_disk(end_run))
    async with fleet.daemon() as daemon:
        await work(coordinator, scaffold(coordinator, 0))
        coordinator.push(outcome=outcome(coordinator, 0))
        with capture_logs() as logs:
            await daemon.until(lambda: len([line for line in logs if line["event"] == "state_dir_failed"]) > 1)
        assert storage(fleet).pending_keys()
        full[0] = False
        await daemon.until(lambda: not storage(fleet).pending_keys())
        assert storage(fleet).held_states() == [pb.HeldState(run_id="run")]
        full[0] = True
        coordinator.push(run_ended=pb.RunEnded(run_id="run"))
        with capture_logs() as logs:
            await daemon.until(lambda: [line for line in logs if line["event"] == "state_dir_failed"])
        if extended:
            await work(coordinator, scaffold(coordinator, 1))
            full[0] = False
            await work(coordinator, scaffold(coordinator, 2, outcome(coordinator, 1)))
        full[0] = False
        await daemon.until(lambda: extended or not storage(fleet).held_states())
    assert [key_of(it) for it in storage(fleet).pending_keys()] == ([("run", 2, 0)] if extended else [])


async def test_the_end_of_a_run_ends_its_work(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """Endless training for a run that is over stops, and the next run's work is done."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await daemon.until(fleet.task.started.is_set)
        coordinator.push(run_ended=pb.RunEnded(run_id="run"))
        await work(coordinator, coordinator.assignment(1, key={"run_id": "next", "round": 1}))
    assert list(coordinator.updates) == [1]


async def test_both_exchanges_of_a_round_are_done(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """Mime: the gradient at w = 0 goes up, with no loss; then a step along (g(y) - g(x)) + m = 0 + 4 from x itself."""
    async with fleet.daemon():
        first = coordinator.assignment(0, algorithm="mime", payloads=[training_pb2.PAYLOAD_KIND_FULL_GRADIENT])
        await work(coordinator, first)
        header, _ = coordinator.updates[0]
        gradient = delta(coordinator, 0)
        second = coordinator.assignment(0, algorithm="mime")
        second.key.exchange = 1
        m = coordinator.publish(tensor_pb2.RESOURCE_KIND_DIRECTION, {"w": torch.tensor([4.0])}, {"w"})
        second.resources.append(m)
        coordinator.assign(second)
        await coordinator.until(lambda: coordinator.updates[0][0].key.exchange == 1)
    assert (gradient, header.num_steps, header.HasField("training_loss")) == (-10.0, 1, False)
    assert delta(coordinator, 0) == pytest.approx(-0.04)
