"""ReportStatus: single reports, failures in a row, and the limit on checks that one client can cause."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl_server.errors import InvalidInput
from fl_server.rounds import effects
from fl_server.rpc.views import client_status
from fl_server.store.errors import StoreFull
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment, ExchangeKey
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until

PAIR = {"round": {"clients_per_round": 2, "quorum": 1}}
AVAILABLE, UNAVAILABLE = pb.Availability(may_train=True), pb.Availability(detail="power: on battery")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def report(world: World, device: Device, *failures: Any, availability: pb.Availability | None = None) -> None:
    """Call ReportStatus with these failures and this availability."""
    request = pb.ReportStatusRequest(session_id=device.session, availability=availability, failures=failures)
    await world.service.ReportStatus(request, NO_CONTEXT)


def has_assignments(device: Device, count: int) -> bool:
    """True if so many assignments were pushed to the device."""
    return len(device.pushed("assignment")) == count


def failure(run: str = "r", reason: pb.FailureReason = pb.FAILURE_REASON_TASK_ERROR, round_: int = 0) -> pb.WorkFailure:
    """A failure report."""
    return pb.WorkFailure(key=ExchangeKey(run_id=run, round=round_), reason=reason, message="no luck")


class Failing(Device):
    """A device whose work always fails."""

    async def contribute(self, world: World, assignment: Assignment) -> None:
        """Report the failure."""
        await self.report_failure(world, assignment, pb.FAILURE_REASON_TASK_ERROR)


@pytest.mark.parametrize("number", [99, -1, 2**31 - 1, -(2**31)])
async def test_an_unknown_reason_takes_the_client_out_of_the_round(world: World, number: Any) -> None:
    """An enum number of a newer client is read as the unspecified value."""
    a, _ = await Device("a", works=False).connect(world), await Device("b").connect(world)
    run = await world.create(**PAIR, stop={"rounds": 1})
    await a.assigned()
    await report(world, a, failure(reason=number))
    await world.completed()
    assert run.rounds.recent[0].accepted == 1
    assert client_status(world.fleet, world.fleet.records.get("a")).note == "unspecified: no luck"


async def test_work_that_a_sites_policy_refuses_is_in_the_audit_log(world: World) -> None:
    """Other failures are not."""
    a, b = await Device("a", works=False).connect(world), await Device("b", works=False).connect(world)
    await world.create(**PAIR, stop={"rounds": 1})
    await a.assigned()
    await b.assigned()
    await report(world, a, failure(reason=pb.FAILURE_REASON_POLICY))
    await report(world, b, failure())
    await until(lambda: world.store.newest_audit_rows(1), "the row is written")
    [row] = world.store.newest_audit_rows(10)
    assert (row.actor, row.method, row.subject, row.detail) == ("client:a", "policy_refused", "r", "no luck")


async def test_an_invalid_report_does_not_block_the_others(world: World) -> None:
    """An unknown run in the middle of a call: the other reports count, and the error names the invalid one."""
    a, _ = await Device("a", works=False).connect(world), await Device("b").connect(world)
    await world.create(**PAIR, stop={"rounds": 1})
    await a.assigned()
    with pytest.raises(InvalidInput, match=r"failures\[1\]\.key\.run_id: expected a run of this coordinator"):
        await report(world, a, failure(round_=7), failure(run="x"), failure(), availability=UNAVAILABLE)
    await world.completed()
    assert not world.fleet.eligibility.availability("a").may_train
    assert world.metric("fl_reports_refused_total", reason="unknown_run") == 1
    assert world.metric("fl_reports_refused_total", reason="late") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [(StoreFull("no room"), "no room"), (KeyError("a bug"), "a bug")],
    ids=["full-disk", "fault"],
)
async def test_a_report_that_cannot_be_taken_does_not_block_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    """All others of the call take effect; the error is the one for which the client calls again."""
    a, _ = await Device("a", works=False).connect(world), await Device("b").connect(world)
    broken = await world.create(name="broken", **PAIR)
    await world.create(**PAIR, stop={"rounds": 1}, labels={"no": "client"})

    async def fails(*_: Any, **__: Any) -> bool:
        raise error

    monkeypatch.setattr(broken.submissions, "client_failed", fails)
    await a.assigned()
    with pytest.raises(type(error), match=message):
        await report(world, a, failure(run="x"), failure(run="broken"), failure(run="r", round_=7), failure(run="y"))
    assert world.metric("fl_reports_refused_total", reason="unknown_run") == 2
    assert world.metric("fl_reports_refused_total", reason="late") == 1


async def test_a_repeated_failure_counts_once(world: World) -> None:
    """Sixty-four equal reports in one call count once, are written once, and check each client once."""
    a, _ = await Device("a", works=False).connect(world), await Device("b", works=False).connect(world)
    run = await world.create(**PAIR)
    await a.assigned()
    await report(world, a, *[failure()] * 64)
    assert [each.failures for each in world.store.quarantine_records()] == [1]
    assert run.submissions.failures.of("a").failures == 1
    assert world.metric("fl_assignments_total", run="r", state="failed") == 1
    assert world.metric("fl_reports_refused_total", reason="not_assigned") == 63


async def test_a_client_with_failures_in_a_row_is_quarantined(tmp_path: Path) -> None:
    """After three failures it is not drawn, and cohorts are complete without it; the count survives a restart."""
    rules = {"failures": 3, "first_s": 10_000.0}
    devices = [Failing("a"), Device("b"), Device("c")]
    async with World(tmp_path, quarantine=rules) as world:
        for device in devices:
            await device.connect(world)
        run = await world.create(round={"sampling": "bernoulli", "rate": 1.0}, stop={"rounds": 6})
        await until(lambda: [each.failures for each in world.store.quarantine_records()] == [2], "two have failed")
        world.journal.dies_at = "commit"
        await until(lambda: world.journal.dead or run.ended, "killed or ended")
    async with World(tmp_path, quarantine=rules) as world:
        for device in devices:
            await device.connect(world)
        await world.completed()
        assert len({each.key.round for each in devices[0].pushed("assignment")}) == 3
        reason = client_status(world.fleet, world.fleet.records.get("a")).quarantine.reason
        assert reason.startswith("3 pieces of work failed in a row, the last one in run r round 2 (task_error: ")


async def test_a_counted_update_resets_the_failures(tmp_path: Path) -> None:
    """A device that fails occasionally is not quarantined."""
    async with World(tmp_path, quarantine={"failures": 2}) as world:
        a, _ = await Device("a", works=False).connect(world), await Device("b").connect(world)
        await world.create(**PAIR, stop={"rounds": 3})
        for round_, works in enumerate((False, True, False)):
            work = await a.assigned(round_)
            if works:
                await a.contribute(world, work)
            else:
                await a.report_failure(world, work, pb.FAILURE_REASON_RESOURCES)
        await world.completed()
        assert [each.failures for each in world.store.quarantine_records()] == [1]
        assert world.metric("fl_quarantines_total") == 0


async def test_repeated_abandoning_does_not_renew_the_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one round a client gets work three times that it abandons; then it must wait for the retry."""
    monkeypatch.setattr(effects, "RETRY_S", 3600.0)
    a, b = await Device("a", works=False).connect(world), await Device("b").connect(world)
    run = await world.create(round={"clients_per_round": 2, "quorum": 2}, stop={"rounds": 1})
    for times in range(1, 6):
        expected = min(times, 3)
        await until(partial(has_assignments, a, expected), f"it has {expected} assignments")
        await report(world, a, failure(reason=pb.FAILURE_REASON_STOPPED), availability=UNAVAILABLE)
        await report(world, a, availability=AVAILABLE)
    await until(lambda: run.status == "waiting", "the run waits for the retry")
    assert len(a.pushed("assignment")) == 3
    assert len(b.pushed("assignment")) == 1


async def test_frequent_availability_changes_are_limited(tmp_path: Path) -> None:
    """Two a minute: the third change to available takes effect later; a change to unavailable always holds at once."""
    async with World(tmp_path, comebacks_per_min=2.0) as world:
        a, b = await Device("a").connect(world), await Device("b").connect(world)
        for _ in range(3):
            await report(world, a, availability=UNAVAILABLE)
            await report(world, a, availability=AVAILABLE)
        version = world.fleet.changes.version
        assert not world.fleet.eligibility.availability("a").may_train
        for _ in range(20):
            await report(world, a, availability=UNAVAILABLE)
            await report(world, a, availability=AVAILABLE)
        assert world.fleet.changes.version == version
        await report(world, b, availability=UNAVAILABLE)
        await report(world, b, availability=AVAILABLE)
        assert world.fleet.eligibility.availability("b").may_train


async def test_a_limited_report_takes_effect_later(tmp_path: Path) -> None:
    """Twenty a second: the waiting report takes effect after 50 ms, without another call."""
    async with World(tmp_path, comebacks_per_min=1200.0) as world:
        a = await Device("a").connect(world)
        for _ in range(1300):
            world.fleet.eligibility.set_availability("a", UNAVAILABLE)
            world.fleet.eligibility.set_availability("a", AVAILABLE)
        assert not world.fleet.eligibility.availability("a").may_train
        await until(lambda: world.fleet.eligibility.availability("a").may_train, "the report takes effect")
        assert a.name == "a"


async def test_other_changes_cause_no_check(world: World) -> None:
    """A new reason, a note or a new stream does not change which clients are eligible."""
    a = await Device("a").connect(world)
    await report(world, a, availability=UNAVAILABLE)
    version = world.fleet.changes.version
    await report(world, a, availability=pb.Availability(detail="power: still on battery"))
    await world.fleet.records.write_note("a", "a text")
    await a.leave()
    a.stream = world.spawn(a._attend(world))
    await until(lambda: len(a.pushed("attached")) == 2, "it attends again")
    assert world.fleet.changes.version == version


async def test_a_note_goes_with_the_next_update_that_counts(world: World) -> None:
    """An old failure is no news of a client that works again; an operator's reason to drain another one stays."""
    for name in "ab":
        await Device(name).connect(world)
    await world.fleet.records.write_note("a", "not_finite: loss nan")
    await world.fleet.records.write_note("b", "resources: no memory")
    await world.operators.drain("b", "move", undo=False, actor="admin")
    run = await world.create(round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 1})
    await world.completed()
    assert run.rounds.recent[0].accepted == 1
    await until(lambda: not world.fleet.records.get("a").note, "the note goes")
    assert world.fleet.records.get("b").note == "move"
