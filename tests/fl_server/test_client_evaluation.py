"""Evaluation on clients, in one process: who is asked, whose answer counts, and when it is over."""

from __future__ import annotations

import pytest

from fl_server.admin import AdminService
from fl_server.errors import InvalidInput
from fl_server.round_state import Phase
from protos.fl.v1 import admin_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.coordinator_pb2 import FAILURE_REASON_TASK_ERROR
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_MODEL
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.fl_server.asking import ASKING, metrics
from tests.fl_server.devices import Device
from tests.fl_server.harness import TASK, World, until


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def fleet(world, *names, works=True):
    """Devices with ten held-out examples each."""
    return [await Device(name, eval_examples=10, works=works).come(world) for name in names]


async def over(world, round_=0):
    """The clients' evaluation of a round has come to its end, and stands in the ledger."""

    def probe():
        commit = world.store.commits("r")[round_]
        return "clients_evaluated" in commit.metrics and commit

    return await until(probe, "it is over")


async def test_what_clients_find_stands_beside_what_the_server_finds(world):
    """Accuracies 0.4 over 10 and 0.8 over 30 examples: mean 0.6, over examples (4 + 24) / 40 = 0.7; also in the ledger.

    The run does not end before both have said their word.
    """
    a, b = await fleet(world, "a", "b")
    run = await world.create(**ASKING)
    await a.asked()
    await until(lambda: "accuracy" in metrics(world), "the server has evaluated")
    assert run.state.phase is Phase.EVALUATING
    await a.report(world, 10, accuracy=0.4)
    await b.report(world, 30, accuracy=0.8)
    await world.completed()
    found = world.store.commits("r")[0].metrics
    assert found == metrics(world)
    assert found["clients_accuracy_mean"] == pytest.approx(0.6)
    assert found["clients_accuracy"] == pytest.approx(0.7)
    assert {"accuracy", "loss", "clients_evaluated"} <= found.keys()
    assert [answer.client_id for answer in world.store.evaluations("r", 0)] == ["a", "b"]
    assert world.metric("fl_evaluation", run="r", metric="clients_accuracy_worst_decile") == 0.4


async def test_who_is_asked(world):
    """Those with held-out examples, the right task and the run's labels; neither drained nor unwilling ones."""
    south, north = {"site": "south"}, {"site": "north"}
    devices = [
        await Device("asked", eval_examples=3, labels=south).come(world),
        await Device("elsewhere", eval_examples=3, labels=north).come(world),
        await Device("no-data", labels=south).come(world),
        await Device("drained", eval_examples=3, labels=south).come(world),
        await Device("unwilling", eval_examples=3, labels=south).come(world),
    ]
    await world.operators.drain("drained", "", undo=False, actor="admin")
    world.fleet.workforce.set_availability("unwilling", pb.Availability(may_train=False))
    await world.create(labels=south, **ASKING)
    await devices[0].asked()
    assert [device.name for device in devices if device.told("evaluation")] == ["asked"]


async def test_with_nobody_to_ask_it_is_over_at_once(world):
    """No client has held-out examples: the run completes long before the deadline, and says that none answered."""
    for name in "ab":
        await Device(name).come(world)
    await world.create(**ASKING)
    await world.completed()
    assert {name: value for name, value in metrics(world).items() if name.startswith("clients_")} == {
        "clients_evaluated": 0
    }


async def test_some_of_many_are_asked(world):
    """Two of five with `clients` = 2, drawn by seed and round: the same two for a run of the same seed."""
    devices = await fleet(world, *"abcde")
    sections = {"stop": {"rounds": 1}, "evaluation": {"clients_every": 1, "clients": 2, "clients_deadline_s": 0.01}}
    for name in ("one", "two"):
        await world.create(name=name, **sections)
        await world.completed(name)
    asked = [sorted(each.key.run_id for each in device.told("evaluation")) for device in devices]
    assert sorted(asked) == [[], [], [], ["one", "two"], ["one", "two"]]


async def test_the_next_round_is_not_held_up(world):
    """Nobody answers about round 0, and round 1 is trained and committed; its model can be fetched all the while."""
    a, _ = await fleet(world, "a", "b")
    run = await world.create(stop={"rounds": 2}, evaluation={"clients_every": 1, "every": 0})
    await until(lambda: run.state.phase is Phase.EVALUATING, "both rounds are committed, and only answers are missing")
    assert len(run.log.commits) == 2
    assignment = await a.asked(0)
    kind, _, data = await a.fetch(world, assignment.resources[0].digest)
    assert (kind, len(data)) == (RESOURCE_KIND_MODEL, assignment.resources[0].size_bytes)


async def test_a_third_round_ends_the_first_before_its_time(world):
    """Two are evaluated at a time, for each holds a model: the oldest comes to what it has."""
    a, b = await fleet(world, "a", "b")
    devices = (a, b)
    for device in devices:
        device.works = False
    await world.create(stop={"rounds": 9}, evaluation={"clients_every": 1, "every": 0})
    for round_ in range(3):
        for device in devices:
            await device.contribute(world, await device.assigned(round_))
        await a.asked(round_)
        if not round_:
            await a.report(world, accuracy=0.25)
    await over(world, 0)
    assert metrics(world, 0)["clients_evaluated"] == 1
    assert "clients_evaluated" not in metrics(world, 1)


async def test_a_model_that_may_turn_out_the_best_is_kept(world):
    """With one checkpoint kept, round 0's stays in round 1: clients still say what it is worth, and it is the best."""
    a, b = await fleet(world, "a", "b")
    stop = {"rounds": 2, "metric": "clients_accuracy_mean"}
    run = await world.create(stop=stop, evaluation={"clients_every": 1, "every": 0}, keep_checkpoints=1)
    for round_, value in enumerate((0.9, 0.1)):
        for device in (a, b):
            await device.asked(1)
            await device.report(world, round_=round_, accuracy=value)
    await world.completed()
    assert run.log.best.round == 0
    assert world.parts.checkpoints.rounds("r") == [0, 1]


async def test_bundles_are_shared_with_the_next_round(world):
    """While the model has not moved on, evaluation and training send the same object: no second copy is made."""
    await fleet(world, "a", "b")
    run = await world.create(stop={"rounds": 1}, evaluation={"clients_every": 1}, algorithm={"name": "fedcm"})
    await until(lambda: run.client_evaluations._under_way, "clients are asked")
    sent = {broadcast.digest: broadcast for broadcast in run.model.broadcasts}
    held = list(run.client_evaluations.broadcasts())
    assert [broadcast.kind for broadcast in held] == ["model"]
    assert all(sent[broadcast.digest] is broadcast for broadcast in held)


async def test_frozen_parts_are_held_once(world):
    """Two rounds under evaluation and the run's own: one object, for it never changes."""
    options = {"model": "frozen"}
    for name in "ab":
        await Device(name, options=options, eval_examples=10).come(world)
    run = await world.create(
        task={"name": TASK, "options": options}, stop={"rounds": 2}, evaluation={"clients_every": 1, "every": 0}
    )
    await until(lambda: len(run.client_evaluations._under_way) == 2, "clients are asked about both rounds")
    sent = [*run.client_evaluations.broadcasts(), *run.model.broadcasts]
    assert [each.kind for each in sent] == ["model", "frozen"] * 2 + ["model", "direction", "frozen"]
    assert len({id(each) for each in sent if each.kind == "frozen"}) == 1


@pytest.mark.parametrize("how", ["fails", "is banned"])
async def test_who_cannot_answer_is_not_waited_for(world, how):
    """A failure, or a client that is gone: the rest make the evaluation, long before its deadline."""
    a, b = await fleet(world, "a", "b")
    await world.create(**ASKING)
    await a.asked()
    await b.asked()
    if how == "fails":
        failure = pb.WorkFailure(key=ExchangeKey(run_id="r", round=0), reason=FAILURE_REASON_TASK_ERROR, message="no")
        await world.service.ReportStatus(pb.ReportStatusRequest(session_id=b.session, failures=[failure]), None)
    else:
        await world.operators.ban("b", "smoke", "admin")
    await a.report(world)
    await world.completed()
    assert metrics(world)["clients_evaluated"] == 1


async def test_who_comes_back_is_asked_again(world):
    """The same question with the time that is left, until it has answered."""
    a, b = await fleet(world, "a", "b")
    await world.create(**ASKING)
    await a.asked()
    await a.leave()
    await a.come(world)
    again = await a.asked(times=2)
    assert again.resources == a.told("evaluation")[0].resources
    assert 0 < again.deadline.seconds <= 60
    await a.report(world)
    await a.leave()
    await a.come(world)
    await b.report(world)
    await world.completed()
    assert len(a.told("evaluation")) == 2


async def test_the_deadline_ends_it(world):
    """Nobody answers in time: it is over with none; who answers later is told nothing bad, and does not count."""
    a, _ = await fleet(world, "a", "b")
    await world.create(stop={"rounds": 1}, evaluation={"clients_every": 1, "clients_deadline_s": 0.05})
    await world.completed()
    await a.asked()
    await a.report(world, accuracy=0.9)
    assert metrics(world)["clients_evaluated"] == 0
    assert not world.store.evaluations("r", 0)


async def test_the_first_word_stands(world):
    """A repeat with another value is answered like the first, and changes nothing."""
    a, b = await fleet(world, "a", "b")
    await world.create(**ASKING)
    await a.asked()
    await a.report(world, accuracy=0.5)
    await a.report(world, accuracy=1.0)
    await b.report(world, accuracy=0.5)
    await world.completed()
    assert metrics(world)["clients_accuracy_mean"] == 0.5


@pytest.mark.parametrize(
    ("examples", "found", "field"),
    [
        (0, {"accuracy": 0.5}, "num_examples"),
        (2**63, {"accuracy": 0.5}, "num_examples"),
        (1, {"accuracy": float("nan")}, "metrics"),
        (1, {"accuracy": 1e200}, "metrics"),
        (1, {"": 0.5}, "metrics"),
        (1, {"x" * 65: 0.5}, "metrics"),
        (1, {"red\x1b[31m": 0.5}, "metrics"),
        (1, {f"m{n}": 0.5 for n in range(65)}, "metrics"),
    ],
)
async def test_values_that_are_none_are_refused(world, examples, found, field):
    """The field is named, and the ledger has nothing of it."""
    a, _ = await fleet(world, "a", "b")
    await world.create(**ASKING)
    await a.asked()
    with pytest.raises(InvalidInput) as caught:
        await a.report(world, examples, **found)
    assert caught.value.field.startswith(field)
    assert not world.store.evaluations("r", 0)


async def test_an_answer_that_nobody_asked_for_is_refused(world):
    """Of a client that was not asked, of a round that is not there, of a run that asks nobody."""
    a, b = await fleet(world, "a", "b")
    stranger = await Device("stranger").come(world)
    await world.create(**ASKING)
    await a.asked()
    for device, round_ in ((stranger, 0), (b, 7)):
        with pytest.raises(InvalidInput, match="was asked for"):
            await device.report(world, round_=round_)


async def test_a_stop_rule_can_look_at_what_clients_find(world):
    """Each round waits for them; the second reaches the target, and the run ends with it."""
    a, b = await fleet(world, "a", "b")
    stop = {"rounds": 5, "metric": "clients_accuracy_mean", "target": 0.7}
    run = await world.create(stop=stop, evaluation={"clients_every": 1, "every": 1})
    for round_, value in enumerate((0.6, 0.7)):
        await a.asked(round_)
        await until(lambda round_=round_: "accuracy" in metrics(world, round_), "the server has evaluated")
        assert (run.state.phase, run.state.round) == (Phase.EVALUATING, round_ + 1)
        await a.report(world, round_=round_, accuracy=value)
        await b.report(world, round_=round_, accuracy=value)
    assert len(await world.completed()) == 2
    assert "clients_accuracy_mean reached 0.7" in run.record.reason
    assert run.log.best.round == 1


async def test_it_goes_on_beyond_the_end_of_the_run(world):
    """The server's target ends the run while clients still evaluate its last model: their numbers come all the same."""
    a, b = await fleet(world, "a", "b")
    await world.create(stop={"rounds": 5, "target": 0.01}, evaluation={"clients_every": 1})
    await a.asked()
    await world.completed()
    await a.fetch(world, (await a.asked()).resources[0].digest)
    await a.leave()
    await a.come(world)
    await a.asked(times=2)
    await a.report(world, accuracy=0.5)
    await b.report(world, accuracy=0.5)
    await over(world)
    assert world.store.commits("r")[0].metrics["clients_evaluated"] == 2


async def rows(world, **request):
    """What the admin service says of the run's evaluations."""
    service = AdminService(world.parts, world.coordinator)
    return await service.ListEvaluations(admin_pb2.ListEvaluationsRequest(run_id="r", **request), None)


async def test_operators_see_each_clients_answer(world):
    """Of the newest round by default, while it is under way and after; a round that is not committed is refused."""
    a, b = await fleet(world, "a", "b")
    run = await world.create(**ASKING)
    with pytest.raises(InvalidInput, match="clients_every"):
        await rows(world)
    await a.asked()
    await a.report(world, 7, accuracy=0.25)
    answer = await rows(world)
    assert [(row.client_id, row.num_examples, dict(row.metrics)) for row in answer.evaluations] == [
        ("a", 7, {"accuracy": 0.25})
    ]
    assert "clients_evaluated" not in answer.round.metrics
    await b.report(world, 1, accuracy=0.75)
    await world.completed()
    assert (await rows(world, round=0)).round.metrics["clients_accuracy_mean"] == 0.5
    assert run.client_evaluations.newest() == 0
    with pytest.raises(InvalidInput, match="one of the 1 committed"):
        await rows(world, round=3)
