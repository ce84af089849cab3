"""What Prometheus is told of a coordinator's runs: from their first moment on, and the same after a restart."""

from __future__ import annotations

import math
from itertools import product

import pytest
from prometheus_client import CollectorRegistry

from fl_server.evaluation import settle
from fl_server.metrics import Metrics
from fl_server.metrics.coordinator import PHASES, REASONS
from fl_server.metrics.runs import LOOKS, STATES
from fl_server.round_state import Phase
from fl_server.tally import Tally
from fl_server.views import run_status
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import RefusalReason
from tests.fl_server.asking import ASKING
from tests.fl_server.devices import Device, announced, stream, upload
from tests.fl_server.harness import World, until

ALONE = {"round": {"clients_per_round": 1, "deadline_s": 30.0}}


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


def gauges(world):
    """All that is read from the runs: (name, labels) -> value."""
    names = {look.name for look in LOOKS}
    found = world.parts.metrics.registry.collect()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in found
        for sample in family.samples
        if sample.name in names
    }


async def test_what_can_happen_in_a_run_is_0_before_it_does(world):
    """A rate over the first refusal is not 0: its counter was there before, with every label that is known."""
    await world.create(name="r")
    registry = world.parts.metrics.registry
    declared = [each for each in world.parts.metrics.kit.declared if each.kind == "counter" and "run" in each.labels]
    assert len(declared) >= 7
    for each in declared:
        known = {name: values for name, values in each.labels.items() if name != "run"}
        for values in product(*known.values()):
            labels = {"run": "r", **dict(zip(known, values, strict=True))}
            assert registry.get_sample_value(each.name, labels) == 0, (each.name, labels)


async def test_a_run_is_in_one_state(world):
    """Exactly one of the six is 1, and fl_runs counts the run there: while it waits, is paused, and is over."""
    run = await world.create(**ALONE)
    for state, move in (
        ("waiting", None),
        ("paused", world.coordinator.pause),
        ("waiting", world.coordinator.resume),
        ("stopped", lambda run, actor: world.coordinator.stop(run, "enough", actor)),
    ):
        if move is not None:
            await move(run, "admin")
        await until(lambda state=state: run.status == state, state)
        told = {each: world.metric("fl_run_state", run="r", state=each) for each in STATES}
        assert told == {**dict.fromkeys(STATES, 0), state: 1}
        assert {each: world.metric("fl_runs", state=each) for each in STATES} == told


async def test_a_run_says_what_it_is_and_wants(world):
    """Name, method and task; rounds, clients, deadline; who is there."""
    await Device("a", works=False).come(world)
    run = await world.create(**ALONE, stop={"rounds": 9})
    await until(lambda: run.state.phase is Phase.COLLECTING, "it is drawn")
    assert world.metric("fl_run_info", run="r", name="r", algorithm="fedcm", task=run.config.task.name) == 1
    wants = ("fl_rounds_planned", "fl_clients_per_round", "fl_round_deadline_seconds", "fl_clients_eligible")
    assert [world.metric(name, run="r") for name in wants] == [9, 1, 30, 1]


async def test_a_restart_changes_no_gauge(tmp_path):
    """Rounds, last commit, losses, evaluations, best values, norms, cosine and state come from the ledger again."""
    devices = [Device(name, eval_examples=10) for name in "ab"]
    async with World(tmp_path) as world:
        for device in devices:
            await device.come(world)
        await world.create(**{**ASKING, "stop": {"rounds": 2}})
        for device, accuracy in zip(devices, (0.25, 0.75), strict=True):
            await device.asked(1)
            await device.report(world, round_=1, accuracy=accuracy)
        await world.completed()
        before = gauges(world)
    assert before["fl_norm", ("of", "update_smallest"), ("run", "r")] > 0
    assert before["fl_client_evaluation", ("metric", "accuracy"), ("run", "r"), ("statistic", "deviation")] == 0.25
    assert {key[0] for key in before} == {look.name for look in LOOKS}
    async with World(tmp_path) as world:
        assert gauges(world) == before


def update_norm(world):
    """Of the one update of the first round, as the ledger has it."""
    (update,) = world.store.updates("r", 0, 0)
    return update.norm


async def test_an_attempt_below_the_quorum_is_counted(world):
    """Its only client fails, is asked again, and delivers: one attempt missed the quorum, in the account too."""
    device = await Device("a", works=False).come(world)
    run = await world.create(**ALONE, stop={"rounds": 1})
    await device.fails(world, await device.assigned(), pb.FAILURE_REASON_TASK_ERROR)
    await until(lambda: run.log.account.quorum_missed, "the attempt is over")
    assert world.metric("fl_quorum_missed_total", run="r") == 1
    await device.contribute(world, await device.assigned())
    await world.completed()
    assert world.metric("fl_quorum_missed_total", run="r") == 1
    shown = run_status(run)
    assert shown.account.assignments == shown.latest.account.assignments == {"failed": 1, "admitted": 1}
    assert shown.account.quorum_missed == shown.latest.account.quorum_missed == 1
    assert (shown.newest_metrics, shown.latest.account.norms["update"]) == (shown.latest.metrics, update_norm(world))


async def test_every_update_says_how_old_its_model_was(world):
    """Two in time, and one that comes when its round is over: 0, 0 and 1 rounds."""
    late, other = [await Device(name, works=False).come(world) for name in "ab"]
    run = await world.create(round={"clients_per_round": 1, "close": "goal", "over_selection": 2, "min_clients": 2})
    work = await late.assigned()
    header, data = await late.update(world, work)
    await other.contribute(world, await other.assigned())
    await until(lambda: run.state.round == 1 and run.state.collects, "the next round is open")
    answer = await world.service.SubmitUpdate(stream(*upload(header, data, late.session)), None)
    assert answer.receipt.reason == RefusalReason.REFUSAL_REASON_LATE
    await other.contribute(world, await other.assigned(1))
    buckets = {le: world.metric("fl_update_staleness_rounds_bucket", run="r", le=le) for le in ("0.0", "1.0", "16.0")}
    assert buckets == {"0.0": 2, "1.0": 3, "16.0": 3}


async def test_a_refused_update_is_in_the_account_by_its_reason(world):
    """A NaN: counted for Prometheus, and kept with the round for who asks the ledger."""
    device = await Device("a", works=False).come(world)
    run = await world.create(**ALONE)
    work = await device.assigned()
    (_, layout, data), *_ = [await device.fetch(world, resource.digest) for resource in work.resources]
    header, data = announced(work, layout, bytes([0xFF] * len(data)))
    await world.service.SubmitUpdate(stream(*upload(header, data, device.session)), None)
    assert world.metric("fl_updates_refused_total", run="r", reason="not_finite") == 1
    assert (run.log.account.refused, run.log.account.assignments) == ({"not_finite": 1}, {"refused": 1})


async def test_an_evaluation_that_is_not_finite_is_counted_and_never_the_best(world):
    """accuracy NaN is the newest value, and no best one."""
    await Device("a").come(world)
    run = await world.create(**ALONE, stop={"rounds": 1}, evaluation={"every": 0})
    await world.completed()
    await settle(run, 0, {"accuracy": math.nan, "loss": 0.25}, "server")
    assert world.metric("fl_evaluations_not_finite_total", run="r") == 1
    best = {name: world.parts.metrics.registry.get_sample_value("fl_evaluation_best", {"run": "r", "metric": name})
            for name in ("accuracy", "loss")}  # fmt: skip
    assert best == {"accuracy": None, "loss": 0.25}
    assert math.isnan(world.metric("fl_evaluation", run="r", metric="accuracy"))


def test_the_reasons_are_those_that_are_entered():
    """Each is a RefusalReason; what says nothing of the update itself is not one of them."""
    names = {name.removeprefix("REFUSAL_REASON_").lower() for name in RefusalReason.keys()}  # noqa: SIM118
    decided = {"late", "not_assigned", "banned", "not_needed", "abandoned", "left_out", "unspecified"}
    assert set(REASONS) == names - decided


def test_the_phases_are_those_of_a_run_that_goes_on(world_metrics):
    """What a run spent ended, before it was extended, is time in no phase."""
    assert set(PHASES) == {phase.value for phase in Phase} - {"ended"}
    metrics, tally = world_metrics
    tally.phase(Phase.ENDED, 1000.0)
    found = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert not [sample for sample in found if sample.labels.get("phase") == "ended"]


@pytest.fixture
def world_metrics():
    """Metrics, and a tally that counts for a run of them."""
    metrics = Metrics(CollectorRegistry())
    metrics.told.goes_on("r")
    return metrics, Tally(metrics, "r", None)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_looked_at_ends_no_scrape(tmp_path):
    """The room of a state directory that is gone is not a number, and all else is told."""
    metrics = Metrics(CollectorRegistry())
    metrics.space.look_at(tmp_path)
    assert (
        0
        < metrics.registry.get_sample_value("fl_state_dir_available_bytes")
        <= metrics.registry.get_sample_value("fl_state_dir_size_bytes")
    )
    tmp_path.rmdir()
    assert math.isnan(metrics.registry.get_sample_value("fl_state_dir_available_bytes"))
