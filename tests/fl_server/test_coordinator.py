"""Whole rounds in one process: who is told what, how operators steer, and what a run refuses."""

from __future__ import annotations

import asyncio

import pytest

from fl_server import events as ev
from fl_server.errors import InvalidInput, NoSuchResource, NoSuchRun, RunExists, WrongState
from fl_server.round_state import Phase
from fl_server.store.base import StoreFull
from fl_server.store.checkpoints import INITIAL
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import REFUSAL_REASON_ABANDONED, REFUSAL_REASON_NOT_NEEDED, ExchangeKey
from tests.fl_server.devices import Device, announced, stream, upload
from tests.fl_server.harness import TASK, World, until

ONE_ROUND = {"stop": {"rounds": 1}}


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def fleet(world, *names, works=False):
    """Devices that are here; by default they do what the test tells them."""
    return [await Device(name, works=works).come(world) for name in names]


async def drawn(world, devices, run):
    """The devices of the round's cohort, once it is drawn, and the others."""
    await until(lambda: run.state.phase is Phase.COLLECTING, "a cohort is drawn")
    cohort = [device for device in devices if device.name in run.state.drawn]
    return cohort, [device for device in devices if device not in cohort]


async def deliver(world, device, round_=0):
    """The device does its work."""
    return await device.contribute(world, await device.assigned(round_))


async def test_everybody_drawn_hears_the_outcome(world):
    """Of three drawn for two updates the first two count; the third is cancelled and told that it was not needed."""
    devices = await fleet(world, "a", "b", "c")
    run = await world.create(
        round={"clients_per_round": 2, "close": "goal", "over_selection": 1.5, "min_clients": 3}, **ONE_ROUND
    )
    for device in devices[:2]:
        await deliver(world, device)
    await world.completed()
    await until(lambda: devices[2].outcomes, "the third hears")
    counted = [device.outcomes["r", 0, 0].counted for device in devices]
    assert counted == [True, True, False]
    assert devices[2].told("cancel")[0].reason == devices[2].outcomes["r", 0, 0].reason == REFUSAL_REASON_NOT_NEEDED
    assert (run.log.commits[0].accepted, run.log.commits[0].dropped) == (2, 1)


async def test_an_outcome_names_the_update_that_counted(world):
    """The digest of what was sent, unclipped; the same when it is asked for at the next registration."""
    (a,) = await fleet(world, "a", works=True)
    await world.create(round={"clients_per_round": 1}, **ONE_ROUND)
    await world.completed()
    (outcome,) = await world.coordinator.outcomes([ExchangeKey(run_id="r", round=0)], "a")
    assert outcome == a.outcomes["r", 0, 0]
    assert (outcome.digest, outcome.clip_factor) == (a.kept["r", 0, 0][1].digest, 1.0)


async def test_a_deadline_with_quorum_closes_the_round(world):
    """One of two has delivered and one is enough: the deadline ends the waiting, and the late one is told so."""
    devices = await fleet(world, "a", "b")
    run = await world.create(round={"clients_per_round": 2, "quorum": 1}, **ONE_ROUND)
    await deliver(world, devices[0])
    assignment = await devices[1].assigned()
    await devices[1].update(world, assignment)
    await until(lambda: run.state.admitted, "one is admitted")
    run.post(ev.DeadlinePassed())
    await world.completed()
    late = await devices[1].contribute(world, assignment)
    assert (late.admitted, run.log.commits[0].accepted, run.log.commits[0].attempts) == (False, 1, 1)


async def test_below_quorum_a_straggler_is_given_the_new_deadline(world):
    """At the deadline one still works: it goes on with the same work, and is told how long, for it stops otherwise."""
    devices = await fleet(world, "a", "b", "c")
    run = await world.create(round={"clients_per_round": 2, "quorum": 2}, **ONE_ROUND)
    (quick, slow), (spare,) = await drawn(world, devices, run)
    await deliver(world, quick)
    await until(lambda: run.state.admitted, "one is admitted")
    run.deadline.start(1.0)
    run.post(ev.DeadlinePassed())
    await spare.assigned()
    first, again = slow.told("assignment")
    assert (first.attempt, again.attempt, again.training) == (0, 1, first.training)
    assert again.deadline.ToTimedelta().total_seconds() > 60.0


async def test_below_quorum_a_replacement_is_drawn_and_what_came_is_kept(world):
    """At the deadline one of two has delivered and two are needed: the third client is drawn, the first not again."""
    devices = await fleet(world, "a", "b", "c")
    run = await world.create(round={"clients_per_round": 2, "quorum": 2}, **ONE_ROUND)
    (quick, _), (spare,) = await drawn(world, devices, run)
    await deliver(world, quick)
    await until(lambda: run.state.admitted, "one is admitted")
    run.post(ev.DeadlinePassed())
    await deliver(world, spare)
    await world.completed()
    assert world.store.accepted("r", 0, 0) == sorted(
        (each.name, each.kept["r", 0, 0][1].digest.value) for each in (quick, spare)
    )
    assert [attempt.cohort for attempt in world.store.attempts("r", 0)][1] == (spare.name,)
    assert len(quick.told("assignment")) == 1
    assert [entry.detail for entry in world.store.history("r") if entry.event == "attempt_opened"] == [
        "round 0, attempt 0: 2 clients are drawn",
        "round 0, attempt 1: 1 client is drawn, 1 update is here",
    ]


async def test_a_lost_client_is_replaced_at_once(world):
    """Nobody waits for the deadline when a client of the cohort is banned: with nobody left, its place is filled."""
    devices = await fleet(world, "a", "b")
    run = await world.create(round={"clients_per_round": 1}, **ONE_ROUND)
    (gone,), (spare,) = await drawn(world, devices, run)
    await world.operators.ban(gone.name, "smoke", "admin")
    await deliver(world, spare)
    await world.completed()
    assert run.log.commits[0].attempts == 2


async def test_nobody_is_left_to_draw(world):
    """The run says what it waits for; the retry gives those who failed another chance."""
    (a,) = await fleet(world, "a")
    run = await world.create(round={"clients_per_round": 1}, **ONE_ROUND)
    await a.assigned()
    run.intake.client_out("a", "failed", "no memory")
    await until(lambda: run.status == "waiting", "it waits")
    assert run.waiting_for == "0 of 1 clients are here that could be drawn"
    run.post(ev.RetryDue())
    await until(lambda: len(a.told("assignment")) == 2, "it is drawn again")
    await deliver(world, a)
    await world.completed()


async def test_a_pause_finishes_the_round_and_draws_no_other(world):
    """The open round is committed; the next one is drawn only after a resume."""
    devices = await fleet(world, "a", "b")
    run = await world.create()
    await world.coordinator.pause(run, "admin:eve")
    for device in devices:
        await deliver(world, device)
    await until(lambda: len(run.log.commits) == 1, "the open round is committed")
    await until(lambda: run.state.phase is Phase.SELECTING, "it is between two rounds")
    assert (run.status, run.record.state, run.state.drawn) == ("paused", "paused", frozenset())
    await world.coordinator.resume(run, "admin:eve")
    assert run.status == "running"
    assert [entry.actor for entry in world.store.history("r")].count("admin:eve") == 2


async def test_a_stop_gives_the_open_round_up(world):
    """Clients are told, nothing of the round stays on disk, and a pending update is told that it was abandoned."""
    devices = await fleet(world, "a", "b")
    run = await world.create()
    await deliver(world, devices[0])
    await devices[1].assigned()
    await world.coordinator.stop(run, "", "admin")
    await world.ended()
    await until(lambda: devices[1].told("cancel"), "the other is told")
    assert devices[1].told("cancel")[0].reason == REFUSAL_REASON_ABANDONED
    assert run.state.ending == ("stopped", "an operator stopped it")
    await until(lambda: not world.parts.spool.sweep(), "the spool is empty")
    assert world.store.updates("r", 0, 0) == []
    (outcome,) = await world.coordinator.outcomes([ExchangeKey(run_id="r", round=0)], "a")
    assert (outcome.counted, outcome.reason) == (False, REFUSAL_REASON_ABANDONED)


async def test_an_operation_from_the_wrong_state_is_refused(world):
    """The error names the state and those that would do."""
    run = await world.create()
    await until(lambda: run.status == "waiting", "it waits")
    with pytest.raises(WrongState, match="run 'r' is waiting; resuming needs it to be paused"):
        await world.coordinator.resume(run, "admin")
    await world.coordinator.stop(run, "enough", "admin")
    with pytest.raises(WrongState, match="run 'r' is stopped; stopping needs"):
        await world.coordinator.stop(run, "", "admin")
    with pytest.raises(WrongState, match="extending needs"):
        await world.coordinator.extend(run, 1, 0.0, "admin")


async def test_an_extension_adds_rounds(world):
    """To a run under way and to one that is over; each keeps its models."""
    devices = await fleet(world, "a", "b", works=True)
    run = await world.create(stop={"rounds": 1, "wall_time_s": 1000.0})
    first = await world.completed()
    await world.coordinator.extend(run, 2, 0.0, "admin")
    assert not run.ended
    await until(lambda: run.ended, "it ends again")
    digests = await world.completed()
    assert (len(digests), digests[:1], run.state.ending[1]) == (3, first, "3 rounds are done")
    assert (run.config.stop.wall_time_s, run.config.horizon) == (1000.0, 1)
    assert all(device.outcomes["r", 2, 0].counted for device in devices)


async def test_an_extension_that_cannot_be_written_is_none(world, monkeypatch):
    """The operator is told, and the next try adds what it says and no more."""
    run = await world.create(stop={"rounds": 5, "wall_time_s": 1000.0})

    def full(*_):
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "add_history", full)
        with pytest.raises(StoreFull):
            await world.coordinator.extend(run, 2, 100.0, "admin")
    assert (run.config.stop.rounds, run.config.stop.wall_time_s, run.record.spec["stop"]["rounds"]) == (5, 1000.0, 5)
    await world.coordinator.extend(run, 2, 100.0, "admin")
    assert (run.state.rounds, run.config.stop.wall_time_s) == (7, 1100.0)


async def test_an_extension_needs_rounds(world):
    """A run whose rounds are all done cannot be given time alone."""
    await fleet(world, "a", "b", works=True)
    run = await world.create(**ONE_ROUND)
    await world.completed()
    with pytest.raises(InvalidInput, match="rounds: expected rounds over 0: all 1 of the run are done, got 0"):
        await world.coordinator.extend(run, 0, 60.0, "admin")


async def test_the_wall_time_ends_a_run(world):
    """A run whose time is over is complete, and says why."""
    run = await world.create(stop={"rounds": 5, "wall_time_s": 0.001})
    await world.ended()
    assert run.state.ending == ("completed", "its 0.001 s are over")


async def test_a_model_that_is_not_finite_fails_the_run(world):
    """The largest float32 twice is an infinite mean: the run fails in words, and the first model stays."""
    devices = await fleet(world, "a", "b")
    run = await world.create(algorithm={"name": "fedavg", "parameters": {"eta_g": 10.0}})
    for device in devices:
        assignment = await device.assigned()
        layout = run.model.engine.layout
        _, data = await device.update(world, assignment)
        header, data = announced(assignment, layout, bytes.fromhex("ffff7f7f") + data[4:])
        answer = await world.service.SubmitUpdate(stream(*upload(header, data, device.session)), None)
        assert answer.receipt.admitted
    await world.ended()
    assert run.status == "failed"
    assert "the model of round 0 is not finite; the model of round -1 stays" in run.state.ending[1]
    assert world.parts.checkpoints.rounds("r") == [INITIAL]


async def test_a_client_works_for_one_run_at_a_time(world):
    """A second run waits until the first lets go of the only client."""
    (a,) = await fleet(world, "a", works=False)
    await world.create(name="one", round={"clients_per_round": 1}, **ONE_ROUND)
    second = await world.create(name="two", round={"clients_per_round": 1}, **ONE_ROUND)
    await a.assigned()
    await until(lambda: second.status == "waiting", "the second waits")
    assert second.eligible() == ()
    await deliver(world, a)
    await world.completed("one")
    await until(lambda: second.state.drawn, "the second draws it")


async def test_ids_are_taken_once(world):
    """A name that is taken is refused; runs without a name are numbered, also when they are made at once."""
    await world.create(name="r")
    with pytest.raises(RunExists, match="a run 'r' exists already"):
        await world.create(name="r")
    made = await asyncio.gather(*(world.create(name="") for _ in range(3)))
    base = "tests.integration.tiny_task-tiny-fedcm"
    assert [run.id for run in made] == [f"{base}-1", f"{base}-2", f"{base}-3"]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": {"name": "digitz"}}, 'task: expected a task that this server can load, got .* Did you mean "digits"'),
        ({"algorithm": {"name": "fedcn"}}, "algorithm: expected .* unknown algorithm: 'fedcn'"),
        ({"algorithm": {"name": "fedcm", "parameters": {"alpha": 2}}}, "parameter 'alpha': expected .*; got 2"),
        ({"initial_model": "/nowhere.safetensors"}, "initial_model: expected a safetensors file"),
    ],
)
async def test_what_cannot_run_is_refused_when_it_is_created(world, sections, words):
    """The error says which setting is wrong; nothing is stored."""
    with pytest.raises(InvalidInput, match=words):
        await world.create(**sections)
    assert (world.coordinator.runs(), world.store.runs()) == ([], [])


async def test_what_is_not_there_is_said_so(world):
    """Runs and resources by names that mean nothing here."""
    with pytest.raises(NoSuchRun, match="no run 'x'; `fl run list` shows"):
        world.coordinator.run("x")
    with pytest.raises(NoSuchResource, match="its round is over; wait for a new assignment"):
        world.coordinator.resource(bytes(32))


async def test_other_code_of_the_task_is_told_at_both_ends(world):
    """A client with another version is not drawn; it gets a notice, and the run says for whom it waits."""
    a = Device("a")
    offer = pb.TaskOffer(name=TASK, fingerprint={"version": "2", "source": "sha256:00"}, train_examples=1)
    registration = a.registration(tasks=[offer])
    a.registration = lambda: registration
    await a.come(world)
    run = await world.create(round={"clients_per_round": 1})
    await until(lambda: a.told("notice"), "it is told")
    assert "install the coordinator's version of the task" in a.told("notice")[0].text
    assert run.eligible() == ()


async def test_rounds_by_name(world):
    """Latest, best, a kept number; before the first commit the first model; what is not kept is refused by name."""
    run = await world.create(keep_checkpoints=1)
    assert await world.coordinator.model_round(run, "latest") == INITIAL
    await fleet(world, "a", "b", works=True)
    await world.completed()
    assert await world.coordinator.model_round(run, "latest") == 1
    assert await world.coordinator.model_round(run, "best") == run.log.best.round
    with pytest.raises(InvalidInput, match=r'round: expected "latest", "best" or a kept round \(.*1\), got \'7\''):
        await world.coordinator.model_round(run, "7")


async def test_a_stopping_coordinator_draws_nobody(world):
    """A run on hold waits with its clients present."""
    run = await world.create()
    run.hold()
    devices = await fleet(world, "a", "b")
    await until(lambda: set(run.state.eligible) == {"a", "b"}, "it sees them")
    assert (run.state.drawn, devices[0].told("assignment")) == (frozenset(), [])


async def test_a_run_that_cannot_be_loaded_keeps_its_id_and_its_models(tmp_path):
    """Its task is gone: other runs go on, its name stays taken, and its clients are told nothing yet."""
    async with World(tmp_path) as world:
        run = await world.create()
        await until(lambda: run.record.state == "waiting" and run.waiting_for, "it waits")
        kept = world.parts.checkpoints.rounds("r")
        spec = {**run.record.spec, "task": {"name": "tests.nowhere:Gone"}}
        await world.coordinator.close()
        await world.parts.ledger.do(world.store.update_run, type(run.record)("r", spec, "running", "", 1.0))
    async with World(tmp_path) as world:
        assert world.coordinator.runs() == []
        with pytest.raises(RunExists):
            await world.create(name="r")
        assert world.parts.checkpoints.rounds("r") == kept
        assert await world.coordinator.outcomes([ExchangeKey(run_id="r")], "a") == []


async def test_a_run_whose_state_is_damaged_fails_alone(tmp_path):
    """The ledger has a round more than the checkpoints: the run fails in words, and the other one is there."""
    async with World(tmp_path) as world:
        await fleet(world, "a", "b", works=True)
        run = await world.create(stop={"rounds": 3})
        await until(lambda: run.log.commits, "a round is committed")
        await world.coordinator.pause(run, "admin")
        await until(lambda: run.state.phase is Phase.SELECTING, "it pauses")
        await world.create(name="other")
        world.parts.checkpoints.remove_run("r")
    async with World(tmp_path) as world:
        run = await world.ended("r")
        assert run.status == "failed"
        assert "its state cannot be read: the ledger has" in run.state.ending[1]
        other = world.coordinator.run("other")
        assert (other.ended, other.model.loaded) == (False, True)
