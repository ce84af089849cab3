"""Evaluation by clients, in one process: which clients are asked, which reports count, and when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl_server.errors import InvalidInput
from fl_server.rounds.state import Phase
from fl_server.rpc.admin import AdminService
from protos.fl.v1 import admin_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.coordinator_pb2 import FAILURE_REASON_TASK_ERROR
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_MODEL
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.fl_server.client_evaluation import WITH_CLIENT_EVALUATION, round_metrics
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import TASK, World, until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def connect(world: World, *names: str, works: bool = True) -> list[Device]:
    """Devices with ten held-out examples each."""
    return [await Device(name, eval_examples=10, works=works).connect(world) for name in names]


async def evaluation_ended(world: World, round_: int = 0) -> Mapping[str, float]:
    """Wait until the clients' evaluation of a round has ended, and return its metrics from the ledger."""

    def probe() -> Mapping[str, float] | None:
        metrics: Mapping[str, float] = world.store.commits("r")[round_].metrics
        return metrics if "clients_evaluated" in metrics else None

    return await until(probe, "the evaluation has ended")


async def test_metrics_of_clients_and_server_are_joined(world: World) -> None:
    """Accuracies 0.4 over 10 and 0.8 over 30 examples: mean 0.6, over examples (4 + 24) / 40 = 0.7; also in the ledger.

    The run ends after both have reported.
    """
    a, b = await connect(world, "a", "b")
    run = await world.create(**WITH_CLIENT_EVALUATION)
    await a.asked_to_evaluate()
    await until(lambda: "accuracy" in round_metrics(world), "the server has evaluated")
    assert run.state.phase is Phase.EVALUATING
    await a.report(world, 10, accuracy=0.4)
    await b.report(world, 30, accuracy=0.8)
    await world.completed()
    found = world.store.commits("r")[0].metrics
    assert found == round_metrics(world)
    assert found["clients_accuracy_mean"] == pytest.approx(0.6)
    assert found["clients_accuracy"] == pytest.approx(0.7)
    assert {"accuracy", "loss", "clients_evaluated"} <= found.keys()
    assert [answer.client_id for answer in world.store.evaluations("r", 0)] == ["a", "b"]
    assert world.metric("fl_evaluation", run="r", metric="clients_accuracy_worst_decile") == 0.4


async def test_which_clients_are_asked(world: World) -> None:
    """Clients with held-out examples, the same task and the run's labels, neither drained nor unavailable."""
    south, north = {"site": "south"}, {"site": "north"}
    devices = [
        await Device("asked", eval_examples=3, labels=south).connect(world),
        await Device("elsewhere", eval_examples=3, labels=north).connect(world),
        await Device("no-data", labels=south).connect(world),
        await Device("drained", eval_examples=3, labels=south).connect(world),
        await Device("unwilling", eval_examples=3, labels=south).connect(world),
    ]
    await world.operators.drain("drained", "", undo=False, actor="admin")
    world.fleet.eligibility.set_availability("unwilling", pb.Availability(may_train=False))
    await world.create(labels=south, **WITH_CLIENT_EVALUATION)
    await devices[0].asked_to_evaluate()
    assert [device.name for device in devices if device.pushed("evaluation")] == ["asked"]


async def test_without_clients_to_ask_an_evaluation_ends_at_once(world: World) -> None:
    """No client has held-out examples: the run completes long before the deadline, with a count of 0 clients."""
    for name in "ab":
        await Device(name).connect(world)
    await world.create(**WITH_CLIENT_EVALUATION)
    await world.completed()
    assert {name: value for name, value in round_metrics(world).items() if name.startswith("clients_")} == {
        "clients_evaluated": 0
    }


async def test_a_sample_of_the_clients_is_asked(world: World) -> None:
    """Two of five with `clients` = 2, drawn by seed and round: a run with the same seed asks the same two."""
    devices = await connect(world, *"abcde")
    sections = {"stop": {"rounds": 1}, "evaluation": {"clients_every": 1, "clients": 2, "clients_deadline_s": 0.01}}
    for name in ("one", "two"):
        await world.create(name=name, **sections)
        await world.completed(name)

    def asked() -> list[list[str]]:
        return sorted(sorted(each.key.run_id for each in device.pushed("evaluation")) for device in devices)

    await until(lambda: sum(map(len, asked())) == 4, "all have their messages")
    assert asked() == [[], [], [], ["one", "two"], ["one", "two"]]


async def test_an_evaluation_does_not_delay_the_next_round(world: World) -> None:
    """No report on round 0 arrives, and round 1 is committed; round 0's model can still be fetched."""
    a, _ = await connect(world, "a", "b")
    run = await world.create(stop={"rounds": 2}, evaluation={"clients_every": 1, "every": 0})
    await until(lambda: run.state.phase is Phase.EVALUATING, "both rounds are committed, and only reports are missing")
    assert run.rounds.committed == 2
    assignment = await a.asked_to_evaluate(0)
    kind, _, data = await a.fetch(world, assignment.resources[0].digest)
    assert (kind, len(data)) == (RESOURCE_KIND_MODEL, assignment.resources[0].size_bytes)


async def test_a_third_evaluation_ends_the_oldest(world: World) -> None:
    """Two run at a time, because each keeps a model: the oldest ends with its reports."""
    a, b = await connect(world, "a", "b")
    devices = (a, b)
    for device in devices:
        device.works = False
    await world.create(stop={"rounds": 9}, evaluation={"clients_every": 1, "every": 0})
    for round_ in range(3):
        for device in devices:
            await device.contribute(world, await device.assigned(round_))
        await a.asked_to_evaluate(round_)
        if not round_:
            await a.report(world, accuracy=0.25)
    await evaluation_ended(world, 0)
    assert round_metrics(world, 0)["clients_evaluated"] == 1
    assert "clients_evaluated" not in round_metrics(world, 1)


async def test_a_model_that_may_be_the_best_is_kept(world: World) -> None:
    """With one checkpoint kept, round 0's stays during round 1: clients still evaluate it, and it is the best."""
    a, b = await connect(world, "a", "b")
    stop = {"rounds": 2, "metric": "clients_accuracy_mean"}
    run = await world.create(stop=stop, evaluation={"clients_every": 1, "every": 0}, keep_checkpoints=1)
    for round_, value in enumerate((0.9, 0.1)):
        for device in (a, b):
            await device.asked_to_evaluate(1)
            await device.report(world, round_=round_, accuracy=value)
        await evaluation_ended(world, round_)
    await world.completed()
    assert run.rounds.best is not None
    assert run.rounds.best.round == 0
    assert world.services.checkpoints.rounds("r") == [0, 1]


async def test_a_run_whose_clients_lack_its_metric_fails_at_their_first_evaluation(world: World) -> None:
    """The reason has the metric and those that came; a run that only chooses its best model by it goes on."""
    devices = await connect(world, "a", "b")
    for name, stop in (("r", {"rounds": 3, "metric": "clients_accuracy", "target": 0.9}), ("s", {"rounds": 1})):
        await world.create(name=name, stop={"metric": "clients_accuracy", **stop}, evaluation={"clients_every": 1})
        for device in devices:
            await device.asked_to_evaluate(times=1 if name == "r" else 2)
            await device.report(world, run=name, loss=0.4)
        await world.ended(name)
    ended = world.coordinator.run("r").state.ending
    assert ended is not None
    expected = "stop.metric: expected a metric that clients report (clients_loss, clients_loss_best_decile"
    assert (ended[0], ended[1][: len(expected)]) == ("failed", expected)
    assert ended[1].endswith("got clients_accuracy")
    assert world.coordinator.run("s").status == "completed"


async def test_only_a_run_that_asks_gets_metrics_of_its_averaged_model(world: World) -> None:
    """A client cannot add such metrics to a run whose clients were sent no averaged model."""
    a, _ = await connect(world, "a", "b")
    await world.create(**WITH_CLIENT_EVALUATION, averaging={"method": "ema", "decay": 0.5})
    assert [each.kind for each in (await a.asked_to_evaluate()).resources] == [RESOURCE_KIND_MODEL]
    with pytest.raises(InvalidInput, match="the run has no evaluation.averaged_on_clients"):
        await a.report(world, accuracy=0.4, averaged_accuracy=0.6)


async def test_bundles_are_shared_with_the_next_round(world: World) -> None:
    """Evaluation and training of the same model send the same object, without a second copy."""
    await connect(world, "a", "b")
    run = await world.create(stop={"rounds": 1}, evaluation={"clients_every": 1}, algorithm={"name": "fedcm"})
    await until(lambda: run.client_evaluations._under_way, "clients are asked")
    sent = {broadcast.digest: broadcast for broadcast in run.model.broadcasts}
    held = list(run.client_evaluations.broadcasts())
    assert [broadcast.kind for broadcast in held] == ["model"]
    assert all(sent[broadcast.digest] is broadcast for broadcast in held)


async def test_frozen_parts_are_held_once(world: World) -> None:
    """Two evaluated rounds and the run share one object, because frozen parts never change."""
    options = {"model": "frozen"}
    for name in "ab":
        await Device(name, options=options, eval_examples=10).connect(world)
    run = await world.create(
        task={"name": TASK, "options": options}, stop={"rounds": 2}, evaluation={"clients_every": 1, "every": 0}
    )
    await until(lambda: len(run.client_evaluations._under_way) == 2, "clients are asked about both rounds")
    sent = [*run.client_evaluations.broadcasts(), *run.model.broadcasts]
    assert [each.kind for each in sent] == ["model", "frozen"] * 2 + ["model", "direction", "frozen"]
    assert len({id(each) for each in sent if each.kind == "frozen"}) == 1


@pytest.mark.parametrize("how", ["fails", "is banned"])
async def test_a_client_that_cannot_evaluate_delays_nothing(world: World, how: str) -> None:
    """After a failure or a lost client the others complete the evaluation, long before its deadline."""
    a, b = await connect(world, "a", "b")
    await world.create(**WITH_CLIENT_EVALUATION)
    await a.asked_to_evaluate()
    await b.asked_to_evaluate()
    if how == "fails":
        failure = pb.WorkFailure(key=ExchangeKey(run_id="r", round=0), reason=FAILURE_REASON_TASK_ERROR, message="no")
        await world.service.ReportStatus(pb.ReportStatusRequest(session_id=b.session, failures=[failure]), NO_CONTEXT)
    else:
        await world.operators.ban("b", "smoke", "admin")
    await a.report(world)
    await world.completed()
    assert round_metrics(world)["clients_evaluated"] == 1


async def test_a_client_that_returns_is_asked_again(world: World) -> None:
    """With the time that is left, until it has reported."""
    a, b = await connect(world, "a", "b")
    await world.create(**WITH_CLIENT_EVALUATION)
    await a.asked_to_evaluate()
    await a.leave()
    await a.connect(world)
    again = await a.asked_to_evaluate(times=2)
    assert again.resources == a.pushed("evaluation")[0].resources
    assert 0 < again.deadline.seconds <= 60
    await a.report(world)
    await a.leave()
    await a.connect(world)
    await b.report(world)
    await world.completed()
    assert len(a.pushed("evaluation")) == 2


async def test_the_deadline_ends_an_evaluation(world: World) -> None:
    """Without a report in time it ends with none; a later report is accepted without an error, and does not count."""
    a, _ = await connect(world, "a", "b")
    await world.create(stop={"rounds": 1}, evaluation={"clients_every": 1, "clients_deadline_s": 0.05})
    await world.completed()
    await a.asked_to_evaluate()
    await a.report(world, accuracy=0.9)
    assert round_metrics(world)["clients_evaluated"] == 0
    assert not world.store.evaluations("r", 0)


async def test_the_first_report_counts(world: World) -> None:
    """A repeat with another value gets the same response, and changes nothing."""
    a, b = await connect(world, "a", "b")
    await world.create(**WITH_CLIENT_EVALUATION)
    await a.asked_to_evaluate()
    await a.report(world, accuracy=0.5)
    await a.report(world, accuracy=1.0)
    await b.report(world, accuracy=0.5)
    await world.completed()
    assert round_metrics(world)["clients_accuracy_mean"] == 0.5


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
async def test_invalid_values_are_refused(world: World, examples: int, found: dict[str, Any], field: str) -> None:
    """The error names the field, and the ledger gets no row."""
    a, _ = await connect(world, "a", "b")
    await world.create(**WITH_CLIENT_EVALUATION)
    await a.asked_to_evaluate()
    with pytest.raises(InvalidInput) as caught:
        await a.report(world, examples, **found)
    assert caught.value.field.startswith(field)
    assert not world.store.evaluations("r", 0)


async def test_an_unrequested_report_is_refused(world: World) -> None:
    """From a client that was not asked, or for a round that does not exist."""
    a, b = await connect(world, "a", "b")
    stranger = await Device("stranger").connect(world)
    await world.create(**WITH_CLIENT_EVALUATION)
    await a.asked_to_evaluate()
    for device, round_ in ((stranger, 0), (b, 7)):
        with pytest.raises(InvalidInput, match="was asked for"):
            await device.report(world, round_=round_)


async def test_a_stop_rule_can_use_a_metric_of_the_clients(world: World) -> None:
    """Each round waits for the clients; the second reaches the target and ends the run."""
    a, b = await connect(world, "a", "b")
    stop = {"rounds": 5, "metric": "clients_accuracy_mean", "target": 0.7}
    run = await world.create(stop=stop, evaluation={"clients_every": 1, "every": 1})

    def server_has_evaluated(round_: int) -> bool:
        return "accuracy" in round_metrics(world, round_)

    for round_, value in enumerate((0.6, 0.7)):
        await a.asked_to_evaluate(round_)
        await until(partial(server_has_evaluated, round_), "the server has evaluated")
        assert (run.state.phase, run.state.round) == (Phase.EVALUATING, round_ + 1)
        await a.report(world, round_=round_, accuracy=value)
        await b.report(world, round_=round_, accuracy=value)
    assert len(await world.completed()) == 2
    assert "clients_accuracy_mean reached 0.7" in run.record.reason
    assert run.rounds.best is not None
    assert run.rounds.best.round == 1


async def test_an_evaluation_continues_after_the_end_of_the_run(world: World) -> None:
    """The server's target ends the run while clients still evaluate the last model: their reports still count."""
    a, b = await connect(world, "a", "b")
    await world.create(stop={"rounds": 5, "metric": "accuracy", "target": 0.01}, evaluation={"clients_every": 1})
    await a.asked_to_evaluate()
    await world.completed()
    await a.fetch(world, (await a.asked_to_evaluate()).resources[0].digest)
    await a.leave()
    await a.connect(world)
    await a.asked_to_evaluate(times=2)
    await a.report(world, accuracy=0.5)
    await b.report(world, accuracy=0.5)
    await evaluation_ended(world)
    assert world.store.commits("r")[0].metrics["clients_evaluated"] == 2


async def evaluation_rows(world: World, **request: Any) -> admin_pb2.ListEvaluationsResponse:
    """The run's evaluations, as the admin service returns them."""
    service = AdminService(world.services, world.coordinator)
    return await service.ListEvaluations(admin_pb2.ListEvaluationsRequest(run_id="r", **request), NO_CONTEXT)


async def test_operators_see_each_clients_evaluation(world: World) -> None:
    """Of the newest round by default, during and after its evaluation; an uncommitted round is refused."""
    a, b = await connect(world, "a", "b")
    run = await world.create(**WITH_CLIENT_EVALUATION)
    with pytest.raises(InvalidInput, match="clients_every"):
        await evaluation_rows(world)
    await a.asked_to_evaluate()
    await a.report(world, 7, accuracy=0.25)
    answer = await evaluation_rows(world)
    assert [(row.client_id, row.num_examples, dict(row.metrics)) for row in answer.evaluations] == [
        ("a", 7, {"accuracy": 0.25})
    ]
    assert "clients_evaluated" not in answer.round.metrics
    await b.report(world, 1, accuracy=0.75)
    await world.completed()
    assert (await evaluation_rows(world, round=0)).round.metrics["clients_accuracy_mean"] == 0.5
    assert run.client_evaluations.newest() == 0
    with pytest.raises(InvalidInput, match="committed round, of which there are 1,"):
        await evaluation_rows(world, round=3)
