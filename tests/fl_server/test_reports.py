"""ReportStatus: each report by itself, failures in a row, and how often one client can make others look."""

from __future__ import annotations

import pytest

from fl_server import round_work
from fl_server.clients.per_minute import PerMinute
from fl_server.errors import InvalidInput
from fl_server.views import client_status
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

PAIR = {"round": {"clients_per_round": 2, "quorum": 1}}
WELL, ILL = pb.Availability(may_train=True), pb.Availability(detail="power: on battery")


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def says(world, device, *failures, availability=None):
    """One call."""
    request = pb.ReportStatusRequest(session_id=device.session, availability=availability, failures=failures)
    await world.service.ReportStatus(request, None)


def failure(run="r", reason=pb.FAILURE_REASON_TASK_ERROR, round_=0):
    """One report."""
    return pb.WorkFailure(key=ExchangeKey(run_id=run, round=round_), reason=reason, message="no luck")


class Failing(Device):
    """A device whose work fails each time."""

    async def contribute(self, world, assignment):
        """Say so."""
        await self.fails(world, assignment, pb.FAILURE_REASON_TASK_ERROR)


@pytest.mark.parametrize("number", [99, -1, 2**31 - 1, -(2**31)])
async def test_a_reason_that_is_not_known_takes_the_client_out_of_the_round(world, number):
    """The number of a newer client's reason is taken as the unspecified value."""
    a, _ = await Device("a", works=False).come(world), await Device("b").come(world)
    run = await world.create(**PAIR, stop={"rounds": 1})
    await a.assigned()
    await says(world, a, failure(reason=number))
    await world.completed()
    assert run.log.commits[0].accepted == 1
    assert client_status(world.fleet, world.fleet.record("a")).note == "unspecified: no luck"


async def test_a_bad_report_keeps_none_of_the_others_from_its_effect(world):
    """A run that is not there, in the middle of a call: the others count, and the call names what was wrong."""
    a, _ = await Device("a", works=False).come(world), await Device("b").come(world)
    await world.create(**PAIR, stop={"rounds": 1})
    await a.assigned()
    with pytest.raises(InvalidInput, match=r"failures\[1\]\.key\.run_id: expected a run of this coordinator"):
        await says(world, a, failure(round_=7), failure(run="x"), failure(), availability=ILL)
    await world.completed()
    assert not world.fleet.workforce.availability("a").may_train
    assert world.metric("fl_reports_refused_total", reason="unknown_run") == 1
    assert world.metric("fl_reports_refused_total", reason="late") == 1


async def test_work_is_given_up_once(world):
    """Sixty-four times in one call: it counts once, is written down once, and looks at no client twice."""
    a, _ = await Device("a", works=False).come(world), await Device("b", works=False).come(world)
    run = await world.create(**PAIR)
    await a.assigned()
    await says(world, a, *[failure()] * 64)
    assert [each.failures for each in world.store.standings()] == [1]
    assert run.intake.gave_up["a"] == 1
    assert world.metric("fl_assignments_total", run="r", state="failed") == 1
    assert world.metric("fl_reports_refused_total", reason="not_assigned") == 63


async def test_a_client_whose_work_fails_in_a_row_is_left_out_for_a_while(tmp_path):
    """After three of three it is not drawn, and rounds have their whole cohort from others; the count survives."""
    rules = {"failures": 3, "first_s": 10_000.0}
    devices = [Failing("a"), Device("b"), Device("c")]
    async with World(tmp_path, quarantine=rules) as world:
        for device in devices:
            await device.come(world)
        run = await world.create(round={"sampling": "bernoulli", "rate": 1.0}, stop={"rounds": 6})
        await until(lambda: [each.failures for each in world.store.standings()] == [2], "two have failed")
        world.journal.dies_at = "commit"
        await until(lambda: world.journal.dead or run.ended, "it dies")
    async with World(tmp_path, quarantine=rules) as world:
        for device in devices:
            await device.come(world)
        await world.completed()
        assert len({each.key.round for each in devices[0].told("assignment")}) == 3
        reason = client_status(world.fleet, world.fleet.record("a")).quarantine.reason
        assert reason.startswith("3 pieces of work failed in a row, the last one in run r round 2 (task_error: ")


async def test_an_update_that_counts_ends_the_row_of_failures(tmp_path):
    """A device that fails now and then is nobody to leave out."""
    async with World(tmp_path, quarantine={"failures": 2}) as world:
        a, _ = await Device("a", works=False).come(world), await Device("b").come(world)
        await world.create(**PAIR, stop={"rounds": 3})
        for round_, works in enumerate((False, True, False)):
            work = await a.assigned(round_)
            if works:
                await a.contribute(world, work)
            else:
                await a.fails(world, work, pb.FAILURE_REASON_RESOURCES)
        await world.completed()
        assert [each.failures for each in world.store.standings()] == [1]
        assert world.metric("fl_quarantines_total") == 0


async def test_giving_up_and_coming_back_again_and_again_renews_no_deadline(world, monkeypatch):
    """In one round a client is asked three times for what it gives up; then it has to wait for the retry."""
    monkeypatch.setattr(round_work, "RETRY_S", 3600.0)
    a, b = await Device("a", works=False).come(world), await Device("b").come(world)
    run = await world.create(round={"clients_per_round": 2, "quorum": 2}, stop={"rounds": 1})
    for times in range(1, 6):
        await until(lambda times=times: len(a.told("assignment")) == min(times, 3), "it is asked, or not any more")
        await says(world, a, failure(reason=pb.FAILURE_REASON_STOPPED), availability=ILL)
        await says(world, a, availability=WELL)
    assert (len(a.told("assignment")), run.status) == (3, "waiting")
    assert len(b.told("assignment")) == 1


async def test_who_comes_back_too_often_waits_for_its_time(tmp_path):
    """Two a minute: the third time it may train is not believed yet; that it may not always is, at once."""
    async with World(tmp_path, comebacks_per_min=2.0) as world:
        a, b = await Device("a").come(world), await Device("b").come(world)
        for _ in range(3):
            await says(world, a, availability=ILL)
            await says(world, a, availability=WELL)
        version = world.fleet.version
        assert not world.fleet.workforce.availability("a").may_train
        for _ in range(20):
            await says(world, a, availability=ILL)
            await says(world, a, availability=WELL)
        assert world.fleet.version == version
        await says(world, b, availability=ILL)
        await says(world, b, availability=WELL)
        assert world.fleet.workforce.availability("b").may_train


async def test_a_word_that_came_too_soon_is_taken_when_its_time_comes(tmp_path):
    """Twenty a second: the word that waits holds after 50 ms, without another call."""
    async with World(tmp_path, comebacks_per_min=1200.0) as world:
        a = await Device("a").come(world)
        for _ in range(1300):
            world.fleet.workforce.set_availability("a", ILL)
            world.fleet.workforce.set_availability("a", WELL)
        assert not world.fleet.workforce.availability("a").may_train
        await until(lambda: world.fleet.workforce.availability("a").may_train, "its time has come")
        assert a.name == "a"


async def test_other_words_make_nobody_look(world):
    """Why a client may not train changes nothing about who may be drawn, nor does a note or a new stream of it."""
    a = await Device("a").come(world)
    await says(world, a, availability=ILL)
    version = world.fleet.version
    await says(world, a, availability=pb.Availability(detail="power: still on battery"))
    await world.fleet.note("a", "a word")
    await a.leave()
    a.stream = world.spawn(a._attend(world))
    await until(lambda: len(a.told("attached")) == 2, "it attends again")
    assert world.fleet.version == version


def test_an_allowance_fills_up_with_time():
    """Six a minute: six at once, then one every ten seconds, and never more than six."""
    allowance = PerMinute(6.0)
    assert [allowance.wait("a", 0.0) for _ in range(6)] == [0.0] * 6
    assert allowance.wait("a", 0.0) == pytest.approx(10.0)
    assert allowance.wait("b", 0.0) == 0.0
    assert allowance.wait("a", 4.0) == pytest.approx(6.0)
    assert allowance.wait("a", 10.0) == 0.0
    assert [allowance.wait("a", 1000.0) for _ in range(6)] == [0.0] * 6
    assert allowance.wait("a", 1000.0) > 0.0
