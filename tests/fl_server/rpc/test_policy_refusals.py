"""Work that a client's site refuses by its policy: the run goes on without the client, which is no fault of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fl_server.rpc.views import client_status, run_status
from fl_server.run.status import lacking, why_waiting
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment, ExchangeKey
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until

ALL = {"sampling": "bernoulli", "rate": 1.0, "quorum": 2, "min_clients": 2}
TASKS = "policy: tasks: 'tiny' is not in tasks.allow"


class Refusing(Device):
    """A device whose site refuses all training."""

    why = TASKS

    async def contribute(self, world: World, assignment: Assignment) -> None:
        """Report the refusal."""
        await refuse(world, self, assignment.key, self.why)


async def refuse(world: World, device: Device, key: ExchangeKey, why: str = TASKS, **report: Any) -> None:
    """Report that the policy refuses some work."""
    failure = pb.WorkFailure(key=key, reason=pb.FAILURE_REASON_POLICY, message=why)
    request = pb.ReportStatusRequest(session_id=device.session, failures=[failure], **report)
    await world.service.ReportStatus(request, NO_CONTEXT)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator that quarantines a client after its first failure."""
    async with World(tmp_path, quarantine={"failures": 1, "after": 1}) as world:
        yield world


async def test_the_run_goes_on_without_the_client(world: World) -> None:
    """It is asked once, the round closes without its deadline, and it is neither quarantined nor asked again."""
    refusing = await Refusing("r").connect(world)
    for name in ("a", "b"):
        await Device(name).connect(world)
    run = await world.create(round=ALL, stop={"rounds": 3})
    await world.completed()
    assert [each.accepted for each in run.rounds.recent.values()] == [2, 2, 2]
    assert len(refusing.pushed("assignment")) == 1
    status = client_status(world.fleet, world.fleet.records.get("r"))
    assert not status.HasField("quarantine")
    assert (dict(status.policy_refusals), status.note) == ({"r": TASKS[8:]}, TASKS)
    assert world.store.quarantine_records() == []


async def test_a_fault_of_the_same_client_still_counts(world: World) -> None:
    """Only refusals by policy are free of consequences."""
    failing = await Device("f", works=False).connect(world)
    await Device("a").connect(world)
    await world.create(round={**ALL, "quorum": 1}, stop={"rounds": 1})
    await failing.report_failure(world, await failing.assigned(), pb.FAILURE_REASON_TASK_ERROR)
    await world.completed()
    assert client_status(world.fleet, world.fleet.records.get("f")).HasField("quarantine")


async def test_operators_see_who_refuses_and_by_which_rule(world: World) -> None:
    """The run waits for clients, and says how many refuse it; a rule that is no word counts as other."""
    devices = [await Refusing(name).connect(world) for name in ("x", "y", "z")]
    devices[2].why = "policy: <b>bad</b>\n: none of these"
    run = await world.create(round=ALL, stop={"rounds": 1})
    await until(lambda: sum(run_status(run).policy_refusals.values()) == 3, "all three refuse")
    assert run_status(run).policy_refusals == {"tasks": 2, "other": 1}
    await until(lambda: run.run_status.waiting_reason, "the run waits")
    assert "; 3 refuse this run by the policy of their site (1 other, 2 tasks), first " in why_waiting(run.context, run)
    assert "3 refuse this run by the policy of their site" in lacking(run.context, run)
    assert world.metric("fl_clients_refusing", run=run.id) == 3


async def test_a_new_session_may_be_drawn_again(world: World) -> None:
    """A daemon that registers again may have another policy."""
    refusing = await Refusing("r").connect(world)
    await Device("a").connect(world)
    run = await world.create(round=ALL, stop={"rounds": 1})
    await until(lambda: run_status(run).policy_refusals == {"tasks": 1}, "it refuses")
    await refusing.leave()
    again = await Device("r").connect(world)
    await world.completed()
    assert run.rounds.recent[0].accepted == 2
    assert len(again.pushed("assignment")) == 1
    assert client_status(world.fleet, world.fleet.records.get("r")).policy_refusals == {}


async def test_a_client_that_may_train_again_may_be_drawn_again(world: World) -> None:
    """A device whose budget of the day was used up reports so with its refusal, and comes back the next day."""
    device = await Device("r", works=False).connect(world)
    await Device("a").connect(world)
    run = await world.create(round=ALL, stop={"rounds": 1})
    key = (await device.assigned()).key
    await refuse(world, device, key, "policy: day: used up", availability=pb.Availability(detail="the day's budget"))
    assert run_status(run).policy_refusals == {"day": 1}
    device.works = True
    back = pb.ReportStatusRequest(session_id=device.session, availability=pb.Availability(may_train=True))
    await world.service.ReportStatus(back, NO_CONTEXT)
    await world.completed()
    assert run.rounds.recent[0].accepted == 2


async def test_a_refused_evaluation_is_not_asked_for_again(world: World) -> None:
    """The client trains on, and the evaluation waits for nobody."""
    devices = [await Device(name, eval_examples=5).connect(world) for name in ("a", "b")]
    asks = {"clients_every": 1, "clients_deadline_s": 600.0}
    waits = {"rounds": 2, "metric": "clients_accuracy", "patience": 5}  # a round begins after the last one's evaluation
    run = await world.create(round=ALL, stop=waits, evaluation=asks)
    key = (await devices[0].asked_to_evaluate(0)).key
    await refuse(world, devices[0], key, "policy: share: no results leave")
    for round_ in (0, 1):
        await devices[1].asked_to_evaluate(round_)
        await devices[1].report(world, round_=round_)
    await world.completed()
    assert [each.accepted for each in run.rounds.recent.values()] == [2, 2]
    assert len(devices[0].pushed("evaluation")) == 1
    assert run_status(run).policy_refusals == {}
    assert client_status(world.fleet, world.fleet.records.get("a")).policy_refusals == {"r": "share: no results leave"}


async def test_a_later_exchange_is_redrawn_without_the_client(world: World) -> None:
    """Mime's second exchange cannot replace a client, so the round begins again with the others."""
    refusing = await Device("r", works=False).connect(world)
    for name in ("a", "b"):
        await Device(name).connect(world)
    run = await world.create(
        algorithm={"name": "mime"}, round={**ALL, "quorum": 3, "min_clients": 2}, stop={"rounds": 1}
    )
    await refusing.contribute(world, await refusing.assigned())
    await refuse(world, refusing, (await refusing.assigned(exchange=1)).key)
    await world.completed()
    assert run.rounds.recent[0].accepted == 2
