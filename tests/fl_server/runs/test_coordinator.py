"""Whole rounds in one process: cohorts, deadlines, outcomes, and runs that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_server.errors import InvalidInput, RunExists
from fl_server.rounds import events as ev
from fl_server.rounds.state import Phase
from fl_server.run.run import Run
from fl_server.store.checkpoints import INITIAL
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import REFUSAL_REASON_NOT_NEEDED, ExchangeKey
from tests.fl_server.devices import NO_CONTEXT, Device, connect, deliver, stream, update_message, upload
from tests.fl_server.harness import TASK, World, until

ONE_ROUND = {"stop": {"rounds": 1}}


async def drawn_and_others(world: World, devices: list[Device], run: Run) -> tuple[list[Device], list[Device]]:
    """The devices of the round's cohort, once it is drawn, and the others."""
    await until(lambda: run.state.phase is Phase.COLLECTING, "a cohort is drawn")
    cohort = [device for device in devices if device.name in run.state.drawn]
    return cohort, [device for device in devices if device not in cohort]


async def test_each_drawn_client_gets_the_outcome(world: World) -> None:
    """Of three drawn for two updates the first two count; the third is cancelled, with the reason NOT_NEEDED."""
    devices = await connect(world, "a", "b", "c")
    run = await world.create(
        round={"clients_per_round": 2, "close": "goal", "over_selection": 1.5, "min_clients": 3}, **ONE_ROUND
    )
    for device in devices[:2]:
        await deliver(world, device)
    await world.completed()
    await until(lambda: devices[2].outcomes, "the third gets its outcome")
    counted = [device.outcomes["r", 0, 0].counted for device in devices]
    assert counted == [True, True, False]
    assert devices[2].pushed("cancel")[0].reason == devices[2].outcomes["r", 0, 0].reason == REFUSAL_REASON_NOT_NEEDED
    assert (run.rounds.recent[0].accepted, run.rounds.recent[0].dropped) == (2, 1)


async def test_an_outcome_names_the_update_that_counted(world: World) -> None:
    """By the digest of the sent, unclipped bytes; the next registration returns the same outcome."""
    (a,) = await connect(world, "a", works=True)
    await world.create(round={"clients_per_round": 1}, **ONE_ROUND)
    await world.completed()
    (outcome,) = await world.coordinator.outcomes.decided([ExchangeKey(run_id="r", round=0)], "a")
    assert outcome == a.outcomes["r", 0, 0]
    assert (outcome.digest, outcome.clip_factor) == (a.kept["r", 0, 0][1].digest, 1.0)


async def test_a_deadline_with_quorum_closes_the_round(world: World) -> None:
    """One of two has delivered and one is enough: the deadline closes the round, and the late update is refused."""
    devices = await connect(world, "a", "b")
    run = await world.create(round={"clients_per_round": 2, "quorum": 1}, **ONE_ROUND)
    await deliver(world, devices[0])
    assignment = await devices[1].assigned()
    await devices[1].update(world, assignment)
    await until(lambda: run.state.admitted, "one is admitted")
    run.post(ev.DeadlinePassed())
    await world.completed()
    late = await devices[1].contribute(world, assignment)
    assert late is not None
    assert (late.admitted, run.rounds.recent[0].accepted, run.rounds.recent[0].attempts) == (False, 1, 1)


async def test_below_quorum_a_straggler_gets_the_new_deadline(world: World) -> None:
    """At the deadline one still works: it continues with the same work and gets the new deadline."""
    devices = await connect(world, "a", "b", "c")
    run = await world.create(round={"clients_per_round": 2, "quorum": 2}, **ONE_ROUND)
    (quick, slow), (spare,) = await drawn_and_others(world, devices, run)
    await deliver(world, quick)
    await until(lambda: run.state.admitted, "one is admitted")
    run.deadline.start(1.0)
    run.post(ev.DeadlinePassed())
    await spare.assigned()
    first, again = slow.pushed("assignment")
    assert (first.attempt, again.attempt, again.training) == (0, 1, first.training)
    assert again.deadline.ToTimedelta().total_seconds() > 60.0


async def test_below_quorum_a_replacement_is_drawn_and_updates_are_kept(world: World) -> None:
    """At the deadline one of two required updates is there: a third client is drawn, the first is not drawn again."""
    devices = await connect(world, "a", "b", "c")
    run = await world.create(round={"clients_per_round": 2, "quorum": 2}, **ONE_ROUND)
    (quick, _), (spare,) = await drawn_and_others(world, devices, run)
    await deliver(world, quick)
    await until(lambda: run.state.admitted, "one is admitted")
    run.post(ev.DeadlinePassed())
    await deliver(world, spare)
    await world.completed()
    assert world.store.accepted("r", 0, 0) == sorted(
        (each.name, each.kept["r", 0, 0][1].digest.value) for each in (quick, spare)
    )
    assert [attempt.cohort for attempt in world.store.attempts("r", 0)][1] == (spare.name,)
    assert len(quick.pushed("assignment")) == 1
    assert [entry.detail for entry in world.store.history("r") if entry.event == "attempt_opened"] == [
        "round 0, attempt 0: 2 clients are drawn",
        "round 0, attempt 1: 1 client is drawn, 1 update is here",
    ]


async def test_a_lost_client_is_replaced_at_once(world: World) -> None:
    """A banned client of the cohort is replaced before the deadline once no other client works."""
    devices = await connect(world, "a", "b")
    run = await world.create(round={"clients_per_round": 1}, **ONE_ROUND)
    (gone,), (spare,) = await drawn_and_others(world, devices, run)
    await world.operators.ban(gone.name, "smoke", "admin")
    await deliver(world, spare)
    await world.completed()
    assert run.rounds.recent[0].attempts == 2


async def test_no_client_is_left_to_draw(world: World) -> None:
    """The run shows its reason to wait; the retry draws the failed clients again."""
    (a,) = await connect(world, "a")
    run = await world.create(round={"clients_per_round": 1}, **ONE_ROUND)
    await a.assigned()
    run.post(ev.WorkFailed("a", "no memory"))
    await until(lambda: run.status == "waiting", "it waits")
    assert run.run_status.waiting_reason == "clients that could be drawn: 0 of 1 here"
    run.post(ev.RetryDue())
    await until(lambda: len(a.pushed("assignment")) == 2, "it is drawn again")
    await deliver(world, a)
    await world.completed()


async def test_the_wall_time_ends_a_run(world: World) -> None:
    """The run completes, with the reason."""
    run = await world.create(stop={"rounds": 5, "wall_time_s": 0.001})
    await world.ended()
    assert run.state.ending == ("completed", "its 0.001 s are over")


async def test_a_model_that_is_not_finite_fails_the_run(world: World) -> None:
    """Twice the largest float32 gives an infinite mean: the run fails with a message, and the first model remains.

    By default such an update is refused.
    """
    devices = await connect(world, "a", "b")
    unlimited = {"clients_per_round": 2, "max_relative_norm": 0.0}
    run = await world.create(algorithm={"name": "fedavg", "parameters": {"eta_g": 10.0}}, round=unlimited)
    for device in devices:
        assignment = await device.assigned()
        layout = run.model.engine.layout
        _, data = await device.update(world, assignment)
        header, data = update_message(assignment, layout, bytes.fromhex("ffff7f7f") + data[4:])
        answer = await world.service.SubmitUpdate(stream(*upload(header, data, device.session)), NO_CONTEXT)
        assert answer.receipt.admitted
    await world.ended()
    assert run.status == "failed"
    assert "the model of round 0 is not finite; the first model stays" in run.record.reason
    assert world.services.checkpoints.rounds("r") == [INITIAL]


async def test_a_client_works_for_one_run_at_a_time(world: World) -> None:
    """A second run waits until the first releases the only client."""
    (a,) = await connect(world, "a", works=False)
    await world.create(name="one", round={"clients_per_round": 1}, **ONE_ROUND)
    second = await world.create(name="two", round={"clients_per_round": 1}, **ONE_ROUND)
    await a.assigned()
    await until(lambda: second.status == "waiting", "the second waits")
    assert second.eligible.now() == ()
    await deliver(world, a)
    await world.completed("one")
    await until(lambda: second.state.drawn, "the second draws it")


class OtherVersion(Device):
    """A device whose version of the task differs from the coordinator's."""

    def registration(self, **changes: Any) -> pb.RegisterRequest:
        """Offers the other version."""
        offer = pb.TaskOffer(name=TASK, fingerprint={"version": "2", "source": "sha256:00"}, train_examples=1)
        return super().registration(tasks=[offer], **changes)


async def test_another_version_of_the_task_is_reported_to_client_and_operator(world: World) -> None:
    """A client with another version is not drawn, and gets a notice."""
    a = await OtherVersion("a").connect(world)
    run = await world.create(round={"clients_per_round": 1})
    await until(lambda: a.pushed("notice"), "it gets a notice")
    assert "install the coordinator's version of the task" in a.pushed("notice")[0].text
    assert run.eligible.now() == ()


async def test_rounds_by_name(world: World) -> None:
    """Latest, best, a kept number, and the initial model before the first commit; any other is refused by its name."""
    run = await world.create(keep_checkpoints=1)
    assert await world.coordinator.model_round(run, "latest") == INITIAL
    await connect(world, "a", "b", works=True)
    await world.completed()
    assert await world.coordinator.model_round(run, "latest") == 1
    assert run.rounds.best is not None
    assert await world.coordinator.model_round(run, "best") == run.rounds.best.round
    with pytest.raises(InvalidInput, match=r'round: expected "latest", "best" or a kept round \(.*1\), got \'7\''):
        await world.coordinator.model_round(run, "7")


async def test_a_stopping_coordinator_draws_no_client(world: World) -> None:
    """A drained run waits although its clients are present."""
    run = await world.create()
    run.drain()
    devices = await connect(world, "a", "b")
    await until(lambda: set(run.state.eligible) == {"a", "b"}, "it sees them")
    assert (run.state.drawn, devices[0].pushed("assignment")) == (frozenset(), [])


async def test_a_run_that_cannot_be_loaded_keeps_its_id_and_its_models(tmp_path: Path) -> None:
    """Its task is missing: other runs continue, its name stays in use, and its clients get no message yet."""
    async with World(tmp_path) as world:
        run = await world.create()
        await until(lambda: run.record.state == "waiting" and run.run_status.waiting_reason, "it waits")
        kept = world.services.checkpoints.rounds("r")
        spec = {**run.record.spec, "task": {"name": "tests.nowhere:Gone"}}
        await world.coordinator.close()
        await world.services.ledger.do(world.store.update_run, type(run.record)("r", spec, "running", "", 1.0))
    async with World(tmp_path) as world:
        assert world.coordinator.runs() == []
        with pytest.raises(RunExists):
            await world.create(name="r")
        assert world.services.checkpoints.rounds("r") == kept
        assert await world.coordinator.outcomes.decided([ExchangeKey(run_id="r")], "a") == []


async def test_a_run_whose_state_is_damaged_fails_alone(tmp_path: Path) -> None:
    """The ledger has a round more than the checkpoints: the run fails with a message, and the other one is loaded."""
    async with World(tmp_path) as world:
        await connect(world, "a", "b", works=True)
        run = await world.create(stop={"rounds": 3})
        await until(lambda: run.rounds.recent, "a round is committed")
        await world.coordinator.actions.pause(run, "admin")
        await until(lambda: run.state.phase is Phase.SELECTING, "it pauses")
        await world.create(name="other")
        world.services.checkpoints.remove_run("r")
    async with World(tmp_path) as world:
        run = await world.ended("r")
        assert run.status == "failed"
        assert "its state cannot be read: the ledger has" in run.record.reason
        other = world.coordinator.run("other")
        assert (other.ended, other.model.loaded) == (False, True)
