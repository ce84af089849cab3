"""Reports of lost client states: their cost for other clients, their count, and restarts of the coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from fl_server.errors import InvalidInput
from fl_server.rpc.views import client_status, run_status
from fl_server.run.run import Run
from protos.fl.v1 import admin_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment, ExchangeKey, Receipt
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until
from tests.marks import slow_except

LOST = pb.FAILURE_REASON_STATE_LOST
ALL = {"sampling": "bernoulli", "rate": 1.0}
SCAFFOLD = {"algorithm": {"name": "scaffold"}, "population": 3, "round": ALL, "stop": {"rounds": 8}}
OFTEN = {"rounds_between_restarts": 1}
NEVER_QUARANTINED = {"after": 0}
Waiting = tuple[World, Run, dict[str, Device]]
"""A coordinator, its run that waits for updates, and the devices by name."""


class Forgetful(Device):
    """A device that reports a lost state `repeats` times for each assignment that names one."""

    repeats = 1
    reported = 0

    async def contribute(self, world: World, assignment: Assignment) -> Receipt | None:
        """Report the state as lost if the assignment names one; otherwise work."""
        if not assignment.HasField("counted"):
            return await super().contribute(world, assignment)
        for _ in range(self.repeats):
            self.reported += 1
            await self.report_failure(world, assignment, LOST)
        return None


class FalseReporter(Device):
    """A device that reports a lost state for every assignment, even without a named state."""

    async def contribute(self, world: World, assignment: Assignment) -> None:
        """Report the state as lost; the coordinator refuses that."""
        with pytest.raises(InvalidInput, match="the assignment named no client state"):
            await self.report_failure(world, assignment, LOST)


async def connect_all(world: World, devices: Iterable[Device]) -> None:
    """Connect all devices, in order."""
    for device in devices:
        await device.connect(world)


def events(world: World, subject: str = "r") -> list[str]:
    """The names of the events in a history."""
    return [entry.event for entry in world.store.history(subject)]


def status_of(world: World, name: str) -> admin_pb2.ClientStatus:
    """The client as operators see it."""
    return client_status(world.fleet, world.fleet.records.get(name))


async def test_one_client_restarts_the_states_three_times_at_most(tmp_path: Path) -> None:
    """With the third loss it is left out, and the run ends with the others in an epoch without it."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=OFTEN) as world:
        await connect_all(world, [Device("a"), Device("b"), Forgetful("m")])
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 12}})
        await world.completed()
        assert (run.record.state_epoch, events(world).count("states_restarted")) == (3, 3)
        assert set(run.client_states.members) == {"a", "b"}
        assert world.metric("fl_states_lost_total", run="r") == 3
        assert world.metric("fl_clients_left_out", run="r") == 0  # it is over
        assert list(run_status(run).states.first_left_out) == ["m"]
        assert "client_left_out" in events(world, "m")
        assert "lost its state 3 times" in status_of(world, "m").note


async def test_between_two_restarts_rounds_are_committed(tmp_path: Path) -> None:
    """The second loss waits for five rounds of the epoch. Until then its client takes no part; the others continue."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states={"rounds_between_restarts": 5}) as world:
        await connect_all(world, [Device("a"), Device("b"), Forgetful("m")])
        await world.create(**{**SCAFFOLD, "stop": {"rounds": 14}})
        await world.completed()
        epochs = [commit.state_epoch for commit in world.store.commits("r")]
        first = epochs.index(1)
        assert epochs[first : first + 6] == [1, 1, 1, 1, 1, 2]
        for round_ in range(first + 1, first + 5):
            assert {client for client, _ in world.store.accepted("r", round_, 0)} == {"a", "b"}


async def test_a_run_without_enough_clients_restarts_the_states_at_once(tmp_path: Path) -> None:
    """Each round needs all three: no loss delays the run until a client is left out; after its release it continues."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states={"losses": 4}) as world:
        devices = [Device("a"), Device("b"), Forgetful("m")]
        await connect_all(world, devices)
        run = await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 3, "quorum": 3}})
        await until(lambda: run.client_states.left_out and run.status == "waiting", "m is left out")
        assert run.record.state_epoch == 3
        assert "1 left out for lost client states, first m: `fl clients release m` lets it take part again" in (
            run_status(run).reason
        )
        devices[2].__class__ = Device
        await world.operators.release("m", "admin")
        await world.completed()
        assert run.record.state_epoch == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "dies_at", slow_except(["put_client_state_records", "restart_round", "commit"], "restart_round")
)
async def test_a_restart_of_the_coordinator_keeps_the_count_of_losses(tmp_path: Path, dies_at: str) -> None:
    """Killed after the write of the first loss, the restart of the states, or a commit: three losses in all."""
    devices = [Device("a"), Device("b"), Forgetful("m")]
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=OFTEN) as world:
        world.spawn(connect_all(world, devices))
        await until(lambda: len(world.fleet.attendance.roster.present()) == 3, "all are here")
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 12}})
        await until(lambda: run.client_states.members or run.record.state_epoch, "one round is committed")
        world.journal.dies_at = dies_at
        await until(lambda: world.journal.dead, "the coordinator is killed")
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=OFTEN) as world:
        await connect_all(world, devices)
        await world.completed()
        run = world.coordinator.run("r")
        assert run.record.state_epoch == 3
        assert [(each.client_id, each.losses) for each in world.store.client_state_records("r")] == [("m", 3)]


@pytest.mark.slow
async def test_a_waiting_loss_is_kept_over_a_restart(tmp_path: Path) -> None:
    """Its client is not drawn, and the states restart after the same number of rounds."""
    devices = [Device("a"), Device("b"), Forgetful("m")]
    states = {"rounds_between_restarts": 6}
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=states) as world:
        await connect_all(world, devices)
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 40}})
        await until(lambda: run.client_states.awaiting_restart(1), "the second loss waits")
        world.journal.dies_at = "open_attempt"
        await until(lambda: world.journal.dead, "the coordinator is killed")
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=states) as world:
        run = world.coordinator.run("r")
        assert set(run.state.lost) == {"m"}
        await connect_all(world, devices)
        await world.completed()
        epochs = [commit.state_epoch for commit in world.store.commits("r")]
        assert [epochs.count(epoch) for epoch in (1, 2)] == [6, 6]


async def test_a_released_client_takes_part_again(tmp_path: Path) -> None:
    """It starts at zero, with a new state in the others' epoch; a second release does nothing and writes no row."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states={"losses": 1, **OFTEN}) as world:
        devices = [Device("a"), Device("b"), Forgetful("m")]
        await connect_all(world, devices)
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 3000}})
        await until(lambda: run.client_states.left_out, "m is left out")
        assert world.metric("fl_clients_left_out", run="r") == 1
        devices[2].__class__ = Device
        later = run.rounds.committed + 2
        await until(lambda: run.rounds.committed >= later, "the restart because of m's last loss is over")
        epoch = run.record.state_epoch
        await world.operators.release("m", "admin:eve")
        await until(lambda: "m" in run.client_states.members, "m counts again")
        assert (run.record.state_epoch, run.client_states.left_out) == (epoch, frozenset())
        await world.operators.release("m", "admin:eve")
        assert events(world, "m").count("client_released") == 1
        await world.coordinator.actions.stop(run, "", "admin")


async def test_a_lost_state_of_an_assignment_that_named_none_is_refused(tmp_path: Path) -> None:
    """It changes no state; the client is out of the round, and quarantined after three in a row."""
    async with World(tmp_path) as world:
        await connect_all(world, [Device("a"), Device("b"), FalseReporter("m")])
        run = await world.create(**SCAFFOLD)
        await world.completed()
        assert (run.record.state_epoch, events(world).count("states_restarted")) == (0, 0)
        assert status_of(world, "m").quarantine.refusals == 3
        assert world.metric("fl_reports_refused_total", reason="no_state") == 3


async def test_losses_count_towards_quarantine(tmp_path: Path) -> None:
    """If one refusal is enough, a client that lost its state is not drawn for a time."""
    async with World(tmp_path, quarantine={"after": 1, "first_s": 10_000.0}) as world:
        await connect_all(world, [Device("a"), Device("b"), Forgetful("m")])
        run = await world.create(**SCAFFOLD)
        await world.completed()
        assert run.record.state_epoch == 1
        assert "state_lost" in status_of(world, "m").quarantine.reason


async def report(world: World, device: Device, reason: pb.FailureReason = LOST, **key: Any) -> None:
    """A failure report for any key."""
    failure = pb.WorkFailure(key=ExchangeKey(**{"run_id": "r", **key}), reason=reason, message="sent by the test")
    await world.service.ReportStatus(pb.ReportStatusRequest(session_id=device.session, failures=[failure]), NO_CONTEXT)


@pytest.fixture
async def waiting(tmp_path: Path) -> AsyncIterator[Waiting]:
    """SCAFFOLD in round 1. a and b delivered in round 0; c was drawn in neither."""
    async with World(tmp_path) as world:
        devices = {name: Device(name, works=False) for name in "abc"}
        await connect_all(world, devices.values())
        run = await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 2, "quorum": 2}})
        await until(lambda: run.state.drawn, "two are drawn")
        for name in sorted(run.state.drawn):
            await devices[name].contribute(world, await devices[name].assigned(0))
        await until(lambda: run.state.round == 1 and run.state.drawn, "round 1 is drawn")
        yield world, run, devices


async def test_reports_about_other_rounds_change_nothing(waiting: Waiting) -> None:
    """A late report is ignored, because delays are normal; a report about a later round is a fault."""
    world, run, devices = waiting
    client = next(iter(run.state.outstanding & set(run.client_states.members)))
    before = run.state
    await report(world, devices[client], round=0)
    assert world.store.quarantine_records() == []
    with pytest.raises(InvalidInput, match="expected the client to be at work for that round, got STATE_LOST"):
        await report(world, devices[client], round=2**32 - 1)
    assert [each.refusals for each in world.store.quarantine_records()] == [1]
    assert (run.state, run.record.state_epoch) == (before, 0)


async def test_a_client_without_work_cannot_lose_a_state(waiting: Waiting) -> None:
    """A client that was not drawn, and one whose update has arrived: both reports are refused and count as faults."""
    world, run, devices = waiting
    (other,) = devices.keys() - run.state.drawn
    done = min(run.state.drawn)
    await devices[done].contribute(world, await devices[done].assigned(1))
    await until(lambda: run.state.admitted, "one has delivered")
    for name in (other, done):
        with pytest.raises(InvalidInput, match="at work"):
            await report(world, devices[name], round=1)
    assert [each.refusals for each in world.store.quarantine_records()] == [1, 1]
    assert run.record.state_epoch == 0


async def test_a_report_that_crosses_the_restart_is_no_fault(tmp_path: Path) -> None:
    """Two clients lose their states at once: the second report comes after the restart, and costs nothing."""
    async with World(tmp_path) as world:
        devices = [Device(name, works=False) for name in "ab"]
        await connect_all(world, devices)
        sections = {**SCAFFOLD, "population": 2, "round": {"clients_per_round": 2}, "stop": {"rounds": 2}}
        run = await world.create(**sections)
        for device in devices:
            await device.contribute(world, await device.assigned(0))
        assigned = [await device.assigned(1) for device in devices]
        for device, work in zip(devices, assigned, strict=True):
            await device.report_failure(world, work, LOST)
        assert run.record.state_epoch == 1
        assert [(each.client_id, each.losses) for each in world.store.client_state_records("r")] == [("a", 1)]
        await until(lambda: run.state.outstanding == {"a", "b"}, "both are drawn again")
        for device in devices:
            work = next(each for each in device.pushed("assignment") if each.state_epoch == 1)
            await device.contribute(world, work)
        await world.completed()
        assert world.store.quarantine_records() == []


async def test_a_method_without_client_states_has_none_to_lose(tmp_path: Path) -> None:
    """The report is refused and counts as a fault, and the client is out of the round."""
    async with World(tmp_path) as world:
        await connect_all(world, [Device("a"), FalseReporter("m")])
        run = await world.create(round={"clients_per_round": 2, "quorum": 1}, stop={"rounds": 1})
        await world.completed()
        assert (run.rounds.recent[0].accepted, [each.refusals for each in world.store.quarantine_records()]) == (1, [1])


async def test_a_repeat_of_a_report_counts_once(tmp_path: Path) -> None:
    """Clients repeat a call whose response was lost."""
    async with World(tmp_path, states={"losses": 1, **OFTEN}) as world:
        forgetful = Forgetful("m")
        forgetful.repeats = 3
        await connect_all(world, [Device("a"), Device("b"), forgetful])
        run = await world.create(**SCAFFOLD)
        await world.completed()
        assert (run.record.state_epoch, forgetful.reported) == (1, 3)
        assert [each.refusals for each in world.store.quarantine_records()] == [1]


async def test_without_a_sum_a_loss_affects_one_client(tmp_path: Path) -> None:
    """FedRobust: a loss costs the other clients nothing, and after three the client is left out of the run."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED) as world:
        await connect_all(world, [Device("a"), Device("b"), Forgetful("m")])
        run = await world.create(algorithm={"name": "fedrobust"}, round=ALL, stop={"rounds": 8})
        await world.completed()
        assert run.record.state_epoch == 0
        assert events(world).count("state_lost") == 3
        assert run.client_states.left_out == {"m"}


async def test_a_clients_lost_state_is_not_named_after_a_restart(tmp_path: Path) -> None:
    """FedRobust: the ledger records that the client starts at zero, and no assignment names the old state."""
    devices = [Device("a", works=False), Device("m", works=False)]
    sections = {"algorithm": {"name": "fedrobust"}, "round": {"clients_per_round": 2}, "stop": {"rounds": 2}}
    async with World(tmp_path) as world:
        await connect_all(world, devices)
        await world.create(**sections)
        for device in devices:
            await device.contribute(world, await device.assigned(0))
        await devices[1].report_failure(world, await devices[1].assigned(1), LOST)
    async with World(tmp_path) as world:
        await connect_all(world, devices)
        assert not devices[1].pushed("assignment")[-1].HasField("counted")
        assert devices[0].pushed("assignment")[-1].HasField("counted")
