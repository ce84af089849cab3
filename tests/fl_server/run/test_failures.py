"""Devices whose work fails, whose daemons end in it, or that never answer: what a run does, also after a restart."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl_server.rounds import effects
from fl_server.rpc.views import client_status, run_status
from fl_server.run.run import Run
from fl_server.run.status import lacking, why_waiting
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until

PLACE = "broken.py, line 11, in loss"
MESSAGE = f"KeyError: 'age' ({PLACE})"
ONE, TWO = {"round": {"clients_per_round": 1}}, {"round": {"clients_per_round": 2}}


class Broken(Device):
    """A device whose task raises."""

    error = "KeyError"

    async def contribute(self, world: World, assignment: Assignment) -> None:
        """Report the error."""
        failure = pb.WorkFailure(
            key=assignment.key, reason=pb.FAILURE_REASON_TASK_ERROR, message=MESSAGE, error_type=self.error, place=PLACE
        )  # fmt: skip
        await world.service.ReportStatus(
            pb.ReportStatusRequest(session_id=self.session, failures=[failure]), NO_CONTEXT
        )


class Crashing(Device):
    """A device whose daemon ends as soon as it has its work. Each connection is another process."""

    def registration(self, **changes: Any) -> pb.RegisterRequest:
        """Its request to register as the next process."""
        self.process += "another "
        return super().registration(**changes)


def history(world: World, run: Run, event: str) -> list[str]:
    """The details of the run's lines of one event."""
    return [line.detail for line in world.store.history(run.id) if line.event == event]


async def start_again(world: World, device: Crashing, starts: int) -> None:
    """End the device's daemon and start another, as often as this, each time after it has its work."""
    asked = len(device.pushed("assignment"))
    for count in range(asked + 1, asked + 1 + starts):
        await device.leave()
        await device.connect(world)
        await until(partial(has_assignments, device, count), "it has its work again")


def has_assignments(device: Device, count: int) -> bool:
    """True if so many assignments were pushed to the device."""
    return len(device.pushed("assignment")) == count


async def test_the_reason_of_a_failure_reaches_the_operator(tmp_path: Path) -> None:
    """File and line are in the status, in the waiting reason, in the history and in the note, also after a restart."""
    async with World(tmp_path) as world:
        await Broken("a").connect(world)
        run = await world.create(**ONE)
        await until(lambda: run.run_status.waiting_reason, "it waits")
        assert f"1 failed in this round, first a: task_error: {MESSAGE}" in why_waiting(run.context, run)
        assert lacking(run.context, run).endswith("1 failed in this round")
        assert history(world, run, "client_failed") == [f"round 0, a: task_error: {MESSAGE}"]
        await until(lambda: world.fleet.records.get("a").note == f"task_error: {MESSAGE}", "it is noted")
    async with World(tmp_path) as world:
        shown = run_status(world.coordinator.run("r")).latest_failure
        assert (shown.client_id, shown.round, shown.clients) == ("a", 0, 1)
        assert shown.message == f"task_error: {MESSAGE}"


async def test_a_run_fails_if_three_devices_fail_on_the_same_line(tmp_path: Path) -> None:
    """Three in one attempt of four, of which one delivers: the reason has type, message, file and line."""
    async with World(tmp_path) as world:
        for name in "abc":
            await Broken(name).connect(world)
        await Device("d").connect(world)
        await world.create(round={"clients_per_round": 4, "quorum": 3})
        run = await world.ended()
        assert run.status == "failed"
        assert run.record.reason.startswith("3 clients failed in round 0 with the same error in the task's code")
        assert f"first a: task_error: {MESSAGE}" in run.record.reason


async def test_failures_before_a_restart_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices fail, the coordinator starts again, and a third one fails: the run fails."""
    monkeypatch.setattr(effects, "RETRY_S", 0.01)
    async with World(tmp_path) as world:
        quiet = await Device("c", works=False).connect(world)
        for name in "ab":
            await Broken(name).connect(world)
        run = await world.create(round={"clients_per_round": 3})
        await quiet.assigned()
        await until(lambda: run.submissions.failures.clients == 2, "two have failed")
    async with World(tmp_path) as world:
        run = world.coordinator.run("r")
        assert set(run.state.failed) == {"a", "b"}
        for name in "ab":
            await Device(name, works=False).connect(world)
        await Broken("c").connect(world)
        await until(lambda: len(run.state.failed) == 3, "the third has failed")
        for name in "ab":
            world.fleet.expel(name, "", "banned")
        assert (await world.ended()).status == "failed"


@pytest.mark.parametrize(("names", "others"), [("ab", "cde"), ("a", "")], ids=["others-are-left", "one-device"])
async def test_few_failures_do_not_fail_a_run(tmp_path: Path, names: str, others: str) -> None:
    """Two of five devices fail and others are drawn; a single device fails no run, for its own data may be wrong."""
    async with World(tmp_path) as world:
        for name in names:
            await Broken(name).connect(world)
        for name in others:
            await Device(name).connect(world)
        run = await world.create(round={"clients_per_round": len(names)}, stop={"rounds": 3})
        if others:
            await world.completed()
        else:
            await until(lambda: run.run_status.waiting_reason, "it waits")
            assert run.status == "waiting"


async def test_a_daemon_that_ends_in_its_work_five_times_has_failed(tmp_path: Path) -> None:
    """Five processes get the assignment, over a restart of the coordinator; the sixth gets none."""
    crashing = Crashing("a", works=False)
    pair = {"clients_per_round": 2, "quorum": 1}
    async with World(tmp_path) as world:
        await crashing.connect(world)
        await Device("b").connect(world)
        await world.create(round=pair, stop={"rounds": 1})
        await crashing.assigned()
        await start_again(world, crashing, 2)
        await crashing.leave()
    async with World(tmp_path) as world:
        await Device("b").connect(world)
        await crashing.connect(world)
        await until(lambda: len(crashing.pushed("assignment")) == 4, "it has its work again")
        await start_again(world, crashing, 1)
        await crashing.leave()
        await crashing.connect(world)
        await world.completed()
        run = world.coordinator.run("r")
        assert len(crashing.pushed("assignment")) == 5
        why = "the daemon restarted while it worked: 5 processes of it had the assignment, and none answered"
        assert history(world, run, "client_failed") == [f"round 0, a: {why}"]
        assert world.fleet.records.get("a").note == why
        assert [each.failures for each in world.store.quarantine_records()] == [1]


async def test_a_daemon_that_starts_again_four_times_still_counts(tmp_path: Path) -> None:
    """It delivers in its fifth process, and nothing is held against it."""
    crashing = Crashing("a", works=False)
    async with World(tmp_path) as world:
        await crashing.connect(world)
        run = await world.create(**ONE, stop={"rounds": 1})
        await crashing.assigned()
        await start_again(world, crashing, 3)
        crashing.works = True
        await start_again(world, crashing, 1)
        await world.completed()
        assert run.rounds.recent[0].accepted == 1
        assert world.store.quarantine_records() == []


async def test_a_device_that_never_answers_is_quarantined(tmp_path: Path) -> None:
    """After three deadlines in a row with the other's updates the note says why; the count survives a restart."""
    rules = {"first_s": 10_000.0}
    section = {"sampling": "bernoulli", "rate": 1.0, "min_clients": 1, "quorum": 1, "deadline_s": 0.3}
    silent, honest = Device("a", works=False), Device("b")
    async with World(tmp_path, quarantine=rules) as world:
        for device in (silent, honest):
            await device.connect(world)
        run = await world.create(round=section, stop={"rounds": 5})
        await until(lambda: [each.deadlines for each in world.store.quarantine_records()] == [1], "it missed one")
    async with World(tmp_path, quarantine=rules, reattach_grace_s=2.0) as world:
        for device in (silent, honest):
            await device.connect(world)
        await world.completed()
        run = world.coordinator.run("r")
        status = client_status(world.fleet, world.fleet.records.get("a"))
        assert status.quarantine.reason.startswith("3 deadlines missed in a row, the last one in run r round ")
        assert "its training hangs, or it is too slow for round.deadline_s" in status.note
        assert len({each.key.round for each in silent.pushed("assignment")}) == 3
        assert world.store.history("a")[-1].event == "client_quarantined"
        assert run.rounds.recent[4].accepted == 1
        rows = [row.detail for row in world.store.history("r") if row.event == "round_committed"]
        assert rows[1] == "round 1 has 1 of 2 updates: 1 cancelled; 1 of them: the deadline passed"


async def test_a_deadline_that_is_too_short_for_all_quarantines_nobody(tmp_path: Path) -> None:
    """Nobody delivers in time, so nothing is held against anybody."""
    async with World(tmp_path, quarantine={"deadlines": 1}) as world:
        for name in "abc":
            await Device(name, works=name == "c").connect(world)
        run = await world.create(round={"clients_per_round": 3, "deadline_s": 0.05, "quorum": 3})
        await until(lambda: run.state.attempt >= 3, "three deadlines have passed")
        await asyncio.sleep(0)
        assert world.store.quarantine_records() == []
