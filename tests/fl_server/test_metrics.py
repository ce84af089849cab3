"""The metrics of a coordinator's runs: complete from the start of a run, and equal after a restart."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fl_server.metrics import PHASES, REASONS, Metrics
from fl_server.rounds.state import Phase
from fl_server.rpc.views import run_status
from fl_server.run.evaluations import record_metrics
from fl_server.run.rounds import RunCounters, RunRounds
from fl_server.runs.gauges import RUN_GAUGES, STATES
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import RefusalReason
from tests.fl_server.client_evaluation import WITH_CLIENT_EVALUATION
from tests.fl_server.criteria import BY_ACCURACY
from tests.fl_server.devices import NO_CONTEXT, Device, stream, update_message, upload
from tests.fl_server.harness import World, until

ALONE = {"round": {"clients_per_round": 1, "deadline_s": 30.0}}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


def gauges(world: World) -> dict[tuple[Any, ...], float]:
    """All gauges of runs: (name, labels) -> value."""
    names = {gauge.name for gauge in RUN_GAUGES}
    found = world.services.metrics.registry.collect()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in found
        for sample in family.samples
        if sample.name in names
    }


async def test_all_counters_of_a_run_start_at_0(world: World) -> None:
    """A rate over the first refusal is not 0: its counter existed before, with every known label."""
    await world.create(name="r")
    registry = world.services.metrics.registry
    declared = [
        each for each in world.services.metrics.factory.declared if each.kind == "counter" and "run" in each.labels
    ]
    assert len(declared) >= 7
    for each in declared:
        known = {name: values for name, values in each.labels.items() if name != "run"}
        for values in product(*known.values()):
            labels = {"run": "r", **dict(zip(known, values, strict=True))}
            assert registry.get_sample_value(each.name, labels) == 0, (each.name, labels)


async def test_a_run_is_in_one_state(world: World) -> None:
    """Exactly one of the six is 1, and fl_runs counts the run there: waiting, paused and ended."""
    run = await world.create(**ALONE)

    async def check_state(state: str) -> None:
        await until(lambda: run.status == state, state)
        exported = {each: world.metric("fl_run_state", run="r", state=each) for each in STATES}
        assert exported == {**dict.fromkeys(STATES, 0), state: 1}
        assert {each: world.metric("fl_runs", state=each) for each in STATES} == exported

    await check_state("waiting")
    await world.coordinator.actions.pause(run, "admin")
    await check_state("paused")
    await world.coordinator.actions.resume(run, "admin")
    await check_state("waiting")
    await world.coordinator.actions.stop(run, "enough", "admin")
    await check_state("stopped")


async def test_a_waiting_run_counts_the_clients_that_it_cannot_draw(world: World) -> None:
    """By reason, until enough can be drawn."""
    for name in "bc":
        await Device(name, works=False).connect(world)
    run = await world.create(**ALONE, labels={"site": "north"})
    await until(lambda: run.status == "waiting", "it waits")
    assert world.metric("fl_clients_not_drawn", run="r", reason="labels") == 2
    await Device("a", labels={"site": "north"}, works=False).connect(world)
    await until(lambda: run.status == "running", "it goes on")
    assert world.metric("fl_clients_not_drawn", run="r", reason="labels") == 0


async def test_metrics_describe_a_run_and_its_settings(world: World) -> None:
    """Name, method and task; rounds, clients, deadline; eligible clients."""
    await Device("a", works=False).connect(world)
    run = await world.create(**ALONE, stop={"rounds": 9})
    await until(lambda: run.state.phase is Phase.COLLECTING, "it is drawn")
    assert world.metric("fl_run_info", run="r", name="r", algorithm="fedcm", task=run.config.task.name) == 1
    names = ("fl_rounds_planned", "fl_clients_per_round", "fl_round_deadline_seconds", "fl_clients_eligible")
    assert [world.metric(name, run="r") for name in names] == [9, 1, 30, 1]


async def test_a_restart_changes_no_gauge(tmp_path: Path) -> None:
    """Rounds, last commit, losses, evaluations, best values, norms, cosine and state come from the ledger again."""
    devices = [Device(name, eval_examples=10) for name in "ab"]
    async with World(tmp_path) as world:
        for device in devices:
            await device.connect(world)
        await world.create(**{**WITH_CLIENT_EVALUATION, "stop": {"rounds": 2}})
        for device, accuracy in zip(devices, (0.25, 0.75), strict=True):
            await device.asked_to_evaluate(1)
            await device.report(world, round_=1, accuracy=accuracy)
        await world.completed()
        before = gauges(world)
    assert before["fl_norm", ("of", "update_smallest"), ("run", "r")] > 0
    assert before["fl_client_evaluation", ("metric", "accuracy"), ("run", "r"), ("statistic", "deviation")] == 0.25
    # In two rounds no client is due five updates; test_client_shares restarts a longer run. The run is not private, and
    # does not wait. It has no buffer.
    of_privacy = {"fl_privacy_epsilon", "fl_privacy_stated_epsilon", "fl_secure_clients"}
    of_buffers = {"fl_buffered_updates", "fl_model_versions"}
    others = {"fl_client_share_of_due", "fl_clients_not_drawn"} | of_privacy | of_buffers
    assert {key[0] for key in before} == {gauge.name for gauge in RUN_GAUGES} - others
    async with World(tmp_path) as world:
        assert gauges(world) == before


def update_norm(world: World) -> float:
    """The norm of the only update of round 0, from the ledger."""
    (update,) = world.store.updates("r", 0, 0)
    norm: float = update.norm
    return norm


async def test_an_attempt_below_the_quorum_is_counted(world: World) -> None:
    """The only client fails, is drawn again and delivers: one attempt missed the quorum, also in the statistics."""
    device = await Device("a", works=False).connect(world)
    run = await world.create(**ALONE, stop={"rounds": 1})
    await device.report_failure(world, await device.assigned(), pb.FAILURE_REASON_TASK_ERROR)
    await until(lambda: run.rounds.statistics.quorum_missed, "the attempt is over")
    assert world.metric("fl_quorum_missed_total", run="r") == 1
    await device.contribute(world, await device.assigned())
    await world.completed()
    assert world.metric("fl_quorum_missed_total", run="r") == 1
    shown = run_status(run)
    assert shown.account.assignments == shown.latest.account.assignments == {"failed": 1, "admitted": 1}
    assert shown.account.quorum_missed == shown.latest.account.quorum_missed == 1
    assert (shown.newest_metrics, shown.latest.account.norms["update"]) == (shown.latest.metrics, update_norm(world))


async def test_the_staleness_of_each_update_is_counted(world: World) -> None:
    """Two updates in time, and one after its round: 0, 0 and 1 rounds."""
    late, other = [await Device(name, works=False).connect(world) for name in "ab"]
    run = await world.create(round={"clients_per_round": 1, "close": "goal", "over_selection": 2, "min_clients": 2})
    work = await late.assigned()
    header, data = await late.update(world, work)
    await other.contribute(world, await other.assigned())
    await until(lambda: run.state.round == 1 and run.state.collects, "the next round is open")
    answer = await world.service.SubmitUpdate(stream(*upload(header, data, late.session)), NO_CONTEXT)
    assert answer.receipt.reason == RefusalReason.REFUSAL_REASON_LATE
    await other.contribute(world, await other.assigned(1))
    await until(lambda: run.state.round == 2, "the second round is committed")
    buckets = {le: world.metric("fl_update_staleness_rounds_bucket", run="r", le=le) for le in ("0.0", "1.0", "16.0")}
    assert buckets == {"0.0": 2, "1.0": 3, "16.0": 3}


async def test_a_refused_update_is_counted_by_its_reason(world: World) -> None:
    """A NaN is counted in the metric and in the round's statistics in the ledger."""
    device = await Device("a", works=False).connect(world)
    run = await world.create(**ALONE)
    work = await device.assigned()
    (_, layout, data), *_ = [await device.fetch(world, resource.digest) for resource in work.resources]
    header, data = update_message(work, layout, bytes([0xFF] * len(data)))
    await world.service.SubmitUpdate(stream(*upload(header, data, device.session)), NO_CONTEXT)
    assert world.metric("fl_updates_refused_total", run="r", reason="not_finite") == 1
    assert (run.rounds.statistics.refused, run.rounds.statistics.assignments) == ({"not_finite": 1}, {"refused": 1})


async def test_an_evaluation_that_is_not_finite_is_counted_and_never_the_best(world: World) -> None:
    """An accuracy of NaN is the newest value, and never the best."""
    await Device("a").connect(world)
    run = await world.create(**ALONE, stop={"rounds": 1}, evaluation={"every": 0})
    await world.completed()
    await record_metrics(run.context, run, 0, {"accuracy": math.nan, "loss": 0.25}, "server")
    assert world.metric("fl_evaluations_not_finite_total", run="r") == 1
    value = world.services.metrics.registry.get_sample_value
    best = [value("fl_evaluation_best", {"run": "r", "metric": metric, "better": better})
            for metric, better in (("accuracy", "higher"), ("loss", "lower"))]  # fmt: skip
    assert best == [None, 0.25]
    assert math.isnan(world.metric("fl_evaluation", run="r", metric="accuracy"))


def test_the_reasons_are_those_of_refused_updates() -> None:
    """Each is a RefusalReason about the update itself."""
    names = {name.removeprefix("REFUSAL_REASON_").lower() for name in RefusalReason.keys()}  # noqa: SIM118 # an enum wrapper is not iterable
    decided = {"late", "not_assigned", "banned", "not_needed", "abandoned", "left_out", "unspecified"}
    assert set(REASONS) == names - decided


def test_the_phases_are_those_of_an_open_run(world_metrics: tuple[Metrics, RunCounters]) -> None:
    """The time between the end of a run and its extension counts for no phase."""
    assert set(PHASES) == {phase.value for phase in Phase} - {"ended"}
    metrics, counters = world_metrics
    counters.phase_ended(Phase.ENDED, 1000.0)
    found = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert not [sample for sample in found if sample.labels.get("phase") == "ended"]


@pytest.fixture
def world_metrics() -> tuple[Metrics, RunCounters]:
    """Metrics, and the counters of one of its runs."""
    metrics = Metrics(CollectorRegistry())
    metrics.reported.started("r")
    return metrics, RunCounters(metrics, "r", RunRounds(BY_ACCURACY))


def test_a_missing_state_directory_ends_no_scrape(tmp_path: Path) -> None:
    """The space of a missing state directory is NaN, and all other metrics are exported."""
    metrics = Metrics(CollectorRegistry())
    metrics.space.watch(tmp_path)

    def bytes_of(name: str) -> float:
        value = metrics.registry.get_sample_value(f"fl_state_dir_{name}_bytes")
        assert value is not None
        return value

    assert 0 < bytes_of("available") <= bytes_of("size")
    tmp_path.rmdir()
    assert math.isnan(bytes_of("available"))
