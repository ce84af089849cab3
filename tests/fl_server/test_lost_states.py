"""Clients that report lost client states: what it costs the others, how it is counted, and that restarts know it."""

from __future__ import annotations

import pytest

from fl_server.errors import InvalidInput
from fl_server.views import client_status, run_status
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

LOST = pb.FAILURE_REASON_STATE_LOST
ALL = {"sampling": "bernoulli", "rate": 1.0}
SCAFFOLD = {"algorithm": {"name": "scaffold"}, "population": 3, "round": ALL, "stop": {"rounds": 8}}
OFTEN = {"rounds_between_restarts": 1}
NEVER_QUARANTINED = {"after": 0}


class Forgetful(Device):
    """A device that loses its state whenever an assignment names one, and says so in every way that it is told to."""

    repeats = 1
    reported = 0

    async def contribute(self, world, assignment):
        """Report the state as lost where there is one; else work."""
        if not assignment.HasField("counted"):
            return await super().contribute(world, assignment)
        for _ in range(self.repeats):
            self.reported += 1
            await self.fails(world, assignment, LOST)
        return None


class Liar(Device):
    """A device that reports a lost state for every assignment, also where none was named."""

    async def contribute(self, world, assignment):
        """Report it, whatever the assignment says."""
        with pytest.raises(InvalidInput, match="the assignment named no client state"):
            await self.fails(world, assignment, LOST)


async def arrive(world, devices):
    """All of them, in order."""
    for device in devices:
        await device.come(world)


def events(world, subject="r"):
    """The events in a history."""
    return [entry.event for entry in world.store.history(subject)]


def shown(world, name):
    """The client as operators see it."""
    return client_status(world.fleet, world.fleet.record(name))


async def test_one_client_restarts_the_states_so_often_and_no_more(tmp_path):
    """Three times; with the last it is left out, and the run ends with the others in an epoch that it is no part of."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=OFTEN) as world:
        await arrive(world, [Device("a"), Device("b"), Forgetful("m")])
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 12}})
        await world.completed()
        assert (run.record.state_epoch, events(world).count("states_restarted")) == (3, 3)
        assert set(run.client_states.members) == {"a", "b"}
        assert world.metric("fl_states_lost_total", run="r") == 3
        assert world.metric("fl_clients_left_out", run="r") == 0  # it is over
        assert list(run_status(run).states.first_left_out) == ["m"]
        assert "client_left_out" in events(world, "m")
        assert "lost its state 3 times" in shown(world, "m").note


async def test_between_two_restarts_rounds_are_committed(tmp_path):
    """The second loss waits for five rounds of the epoch; its client takes no part until then, and the others go on."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states={"rounds_between_restarts": 5}) as world:
        await arrive(world, [Device("a"), Device("b"), Forgetful("m")])
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 14}})
        await world.completed()
        epochs = [commit.state_epoch for commit in run.log.commits.values()]
        first = epochs.index(1)
        assert epochs[first : first + 6] == [1, 1, 1, 1, 1, 2]
        for round_ in range(first + 1, first + 5):
            assert {client for client, _ in world.store.accepted("r", round_, 0)} == {"a", "b"}


async def test_a_run_that_lacks_its_clients_does_not_wait_for_the_next_restart(tmp_path):
    """All three are wanted in each round: no loss holds it up until one client is left out; released, all goes on."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states={"losses": 4}) as world:
        devices = [Device("a"), Device("b"), Forgetful("m")]
        await arrive(world, devices)
        run = await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 3, "quorum": 3}})
        await until(lambda: run.client_states.left_out and run.status == "waiting", "m is left out")
        assert run.record.state_epoch == 3
        assert "1 left out for lost client states, first m: `fl clients release m` lets it back" in (
            run_status(run).reason
        )
        devices[2].__class__ = Device
        await world.operators.release("m", "admin")
        await world.completed()
        assert run.record.state_epoch == 4


@pytest.mark.parametrize("dies_at", ["put_state_standings", "restart_round", "commit"])
async def test_a_restart_of_the_coordinator_forgets_no_loss(tmp_path, dies_at):
    """Killed behind the write of the first loss, behind the restart of the states, or behind a commit: three in all."""
    devices = [Device("a"), Device("b"), Forgetful("m")]
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=OFTEN) as world:
        world.spawn(arrive(world, devices))
        await until(lambda: len(world.fleet.present()) == 3, "all are here")
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 12}})
        await until(lambda: run.client_states.members or run.record.state_epoch, "one round is committed")
        world.journal.dies_at = dies_at
        await until(lambda: world.journal.dead, "it dies")
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=OFTEN) as world:
        await arrive(world, devices)
        await world.completed()
        run = world.coordinator.run("r")
        assert run.record.state_epoch == 3
        assert [(each.client_id, each.losses) for each in world.store.state_standings("r")] == [("m", 3)]


async def test_a_loss_that_waits_is_known_after_a_restart(tmp_path):
    """Its client is not drawn, and the states restart when it is time for that."""
    devices = [Device("a"), Device("b"), Forgetful("m")]
    states = {"rounds_between_restarts": 6}
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=states) as world:
        await arrive(world, devices)
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 40}})
        await until(lambda: run.client_states.waiting(1), "the second loss waits")
        world.journal.dies_at = "open_attempt"
        await until(lambda: world.journal.dead, "it dies")
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states=states) as world:
        run = world.coordinator.run("r")
        assert run.client_states.kept_out(1) == {"m"}
        await arrive(world, devices)
        await world.completed()
        epochs = [commit.state_epoch for commit in run.log.commits.values()]
        assert [epochs.count(epoch) for epoch in (1, 2)] == [6, 6]


async def test_a_released_client_takes_part_again(tmp_path):
    """From zero, with a fresh state in the epoch of the others; a second release finds nothing, and leaves no line."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED, states={"losses": 1, **OFTEN}) as world:
        devices = [Device("a"), Device("b"), Forgetful("m")]
        await arrive(world, devices)
        run = await world.create(**{**SCAFFOLD, "stop": {"rounds": 3000}})
        await until(lambda: run.client_states.left_out, "m is left out")
        assert world.metric("fl_clients_left_out", run="r") == 1
        devices[2].__class__ = Device
        epoch = run.record.state_epoch
        await world.operators.release("m", "admin:eve")
        await until(lambda: "m" in run.client_states.members, "m counts again")
        assert (run.record.state_epoch, run.client_states.left_out) == (epoch, frozenset())
        await world.operators.release("m", "admin:eve")
        assert events(world, "m").count("client_released") == 1
        await world.coordinator.stop(run, "", "admin")


async def test_a_lost_state_of_an_assignment_that_named_none_is_refused(tmp_path):
    """It changes no state; the liar is out of the round, and quarantined after three in a row."""
    async with World(tmp_path) as world:
        await arrive(world, [Device("a"), Device("b"), Liar("m")])
        run = await world.create(**SCAFFOLD)
        await world.completed()
        assert (run.record.state_epoch, events(world).count("states_restarted")) == (0, 0)
        assert shown(world, "m").quarantine.refusals == 3
        assert world.metric("fl_reports_refused_total", reason="no_state") == 3


async def test_losses_count_towards_quarantine(tmp_path):
    """With one that is enough, a client that has lost its state is not drawn for a while."""
    async with World(tmp_path, quarantine={"after": 1, "first_s": 10_000.0}) as world:
        await arrive(world, [Device("a"), Device("b"), Forgetful("m")])
        run = await world.create(**SCAFFOLD)
        await world.completed()
        assert run.record.state_epoch == 1
        assert "state_lost" in shown(world, "m").quarantine.reason


async def report(world, device, reason=LOST, **key):
    """A failure report for any key."""
    failure = pb.WorkFailure(key=ExchangeKey(**{"run_id": "r", **key}), reason=reason, message="as the test wants it")
    await world.service.ReportStatus(pb.ReportStatusRequest(session_id=device.session, failures=[failure]), None)


@pytest.fixture
async def waiting(tmp_path):
    """Round 1 of SCAFFOLD, of which a and b have delivered round 0; c was in neither."""
    async with World(tmp_path) as world:
        devices = {name: Device(name, works=False) for name in "abc"}
        await arrive(world, devices.values())
        run = await world.create(**{**SCAFFOLD, "round": {"clients_per_round": 2, "quorum": 2}})
        await until(lambda: run.state.drawn, "two are drawn")
        for name in sorted(run.state.drawn):
            await devices[name].contribute(world, await devices[name].assigned(0))
        await until(lambda: run.state.round == 1 and run.state.drawn, "round 1 is drawn")
        yield world, run, devices


async def test_reports_about_other_rounds_change_nothing(waiting):
    """One that comes late is passed over, for that may happen to anybody; one about a later round is a fault."""
    world, run, devices = waiting
    client = next(iter(run.state.outstanding & set(run.client_states.members)))
    before = run.state
    await report(world, devices[client], round=0)
    assert world.store.standings() == []
    with pytest.raises(InvalidInput, match="expected the client to be at work for that round, got STATE_LOST"):
        await report(world, devices[client], round=2**32 - 1)
    assert [each.refusals for each in world.store.standings()] == [1]
    assert (run.state, run.record.state_epoch) == (before, 0)


async def test_who_is_not_at_work_has_no_state_to_lose(waiting):
    """A client that was not drawn, and one whose update is here: refused, and a fault."""
    world, run, devices = waiting
    (other,) = devices.keys() - run.state.drawn
    done = min(run.state.drawn)
    await devices[done].contribute(world, await devices[done].assigned(1))
    await until(lambda: run.state.admitted, "one has delivered")
    for name in (other, done):
        with pytest.raises(InvalidInput, match="at work"):
            await report(world, devices[name], round=1)
    assert [each.refusals for each in world.store.standings()] == [1, 1]
    assert run.record.state_epoch == 0


async def test_a_report_that_crosses_the_restart_is_nobodys_fault(tmp_path):
    """Two lose their states at once: the second report comes when the first has restarted them, and costs nothing."""
    async with World(tmp_path) as world:
        devices = [Device(name, works=False) for name in "ab"]
        await arrive(world, devices)
        sections = {**SCAFFOLD, "population": 2, "round": {"clients_per_round": 2}, "stop": {"rounds": 2}}
        run = await world.create(**sections)
        for device in devices:
            await device.contribute(world, await device.assigned(0))
        assigned = [await device.assigned(1) for device in devices]
        for device, work in zip(devices, assigned, strict=True):
            await device.fails(world, work, LOST)
        assert run.record.state_epoch == 1
        assert [(each.client_id, each.losses) for each in world.store.state_standings("r")] == [("a", 1)]
        await until(lambda: run.state.outstanding == {"a", "b"}, "both are asked anew")
        for device in devices:
            work = next(each for each in device.told("assignment") if each.state_epoch == 1)
            await device.contribute(world, work)
        await world.completed()
        assert world.store.standings() == []


async def test_a_method_without_client_states_has_none_to_lose(tmp_path):
    """The report is refused and counts as a fault; the client is out of the round all the same."""
    async with World(tmp_path) as world:
        await arrive(world, [Device("a"), Liar("m")])
        run = await world.create(round={"clients_per_round": 2, "quorum": 1}, stop={"rounds": 1})
        await world.completed()
        assert (run.log.commits[0].accepted, [each.refusals for each in world.store.standings()]) == (1, [1])


async def test_a_repeat_of_a_report_counts_once(tmp_path):
    """A call whose answer was lost is made again."""
    async with World(tmp_path, states={"losses": 1, **OFTEN}) as world:
        forgetful = Forgetful("m")
        forgetful.repeats = 3
        await arrive(world, [Device("a"), Device("b"), forgetful])
        run = await world.create(**SCAFFOLD)
        await world.completed()
        assert (run.record.state_epoch, forgetful.reported) == (1, 3)
        assert [each.refusals for each in world.store.standings()] == [1]


async def test_where_no_sum_is_kept_a_loss_is_the_clients_own(tmp_path):
    """FedRobust: each loss costs others nothing, and after three the client is left out of the run."""
    async with World(tmp_path, quarantine=NEVER_QUARANTINED) as world:
        await arrive(world, [Device("a"), Device("b"), Forgetful("m")])
        run = await world.create(algorithm={"name": "fedrobust"}, round=ALL, stop={"rounds": 8})
        await world.completed()
        assert run.record.state_epoch == 0
        assert events(world).count("state_lost") == 3
        assert run.client_states.left_out == {"m"}


async def test_a_state_that_one_client_lost_alone_is_not_named_after_a_restart(tmp_path):
    """FedRobust: the ledger has that the client begins anew, so that it is not asked for the old state again."""
    devices = [Device("a", works=False), Device("m", works=False)]
    sections = {"algorithm": {"name": "fedrobust"}, "round": {"clients_per_round": 2}, "stop": {"rounds": 2}}
    async with World(tmp_path) as world:
        await arrive(world, devices)
        await world.create(**sections)
        for device in devices:
            await device.contribute(world, await device.assigned(0))
        await devices[1].fails(world, await devices[1].assigned(1), LOST)
    async with World(tmp_path) as world:
        await arrive(world, devices)
        assert not devices[1].told("assignment")[-1].HasField("counted")
        assert devices[0].told("assignment")[-1].HasField("counted")
