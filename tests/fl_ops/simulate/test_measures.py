"""What a simulation measures beyond its evaluations: training accuracy of each client, and sharpness."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.sharpness import MeanLoss, largest_eigenvalue
from fl_client.training.data import LocalTask
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.engine_choice import EngineOptions, EngineRequest
from fl_ops.simulate.measures.section import MeasureSection
from fl_ops.simulate.measures.sharpness import sampled
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.saving.save import RunSave
from fl_ops.simulate.seeds import Job, simulate
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation
from fl_tasks import Examples, TaskError
from fl_tasks.data.batched import Batched
from fl_tasks.evaluation import evaluate
from tests.fl_ops.simulate.conftest import MakeTable, Simulated, continued

SHARPNESS = {"examples": 30, "probes": 4, "rho": 0.1}
MEASURE: dict[str, Any] = {"clients": 4, "names": "c{index}", "measure": {"every": 2, "sharpness": SHARPNESS}}
FLATNESS = {"hessian_largest", "hessian_largest_residual", "hessian_trace", "hessian_trace_error", "sharpness"}


def all_rounds(simulation: Simulation) -> list[RoundResult]:
    """The rounds of a run, with what it measures at its end."""
    results = list(simulation.rounds())
    simulation.with_last_measures(results)
    return results


def test_the_training_accuracy_is_of_every_client(simulated: Simulated) -> None:
    """The last model on each client's own training examples: mean, deviation and deciles over all clients."""
    with simulated(simulation=MEASURE) as simulation:
        measured = all_rounds(simulation)[-1].measured
        clients, task = simulation.federation.clients, simulation.federation.task
        model = task.model()
        model.load_state_dict(simulation.model())
        own = sorted(evaluate(task, model, clients[client].train)["accuracy"] for client in clients)
    mean = math.fsum(own) / len(own)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in own) / len(own))
    assert measured["clients_training_evaluated"] == len(own) == 4
    found = [measured[f"clients_training_accuracy_{end}"] for end in ("mean", "std", "worst_decile", "best_decile")]
    assert found == pytest.approx([mean, deviation, own[0], own[-1]])


def test_it_measures_every_so_many_rounds_and_at_the_end(simulated: Simulated) -> None:
    """After rounds 2 and 3 of 3; the sharpness of the last one is that of the model on all 30 sampled examples."""
    with simulated(simulation=MEASURE) as simulation:
        results = all_rounds(simulation)
        assert [sorted(result.measured) != [] for result in results] == [False, True, True]
        assert FLATNESS < results[-1].measured.keys()
        task, clients = simulation.federation.task, simulation.federation.clients
        (examples,) = sampled(clients, 30, 0)
        assert isinstance(examples, Examples)
        model = task.model()
        model.load_state_dict(simulation.model())
        loss = MeanLoss(model, task.loss, [(examples.inputs, examples.targets)])
    assert len(examples) == 30
    assert results[-1].measured["hessian_largest"] == pytest.approx(largest_eigenvalue(loss).value, rel=1e-5)


def test_measures_change_no_bit_of_a_run(simulated: Simulated) -> None:
    """Digests, metrics and bytes are those of the run that measures nothing, whose results have no new field."""
    kept = []
    for section in ({}, MEASURE):
        with simulated(simulation=section) as simulation:
            kept.append(all_rounds(simulation))
    plain, measured = kept
    for one, other in zip(plain, measured, strict=True):
        assert (one.digest, one.metrics, one.bytes_down) == (other.digest, other.metrics, other.bytes_down)
        assert "measured" not in one.as_json()


@pytest.mark.parametrize(
    ("engine", "tolerance"),
    [(EngineOptions(workers=2), 0.0), (EngineRequest("batched").options(), 1e-3)],
    ids=["workers", "lockstep"],
)
def test_every_engine_measures_the_same(simulated: Simulated, engine: EngineOptions, tolerance: float) -> None:
    """Workers to the bit; clients in lockstep to what the models differ by."""
    with simulated(simulation=MEASURE) as simulation:
        expected = all_rounds(simulation)[-1].measured
    with simulated(engine, simulation=MEASURE) as simulation:
        measured = all_rounds(simulation)[-1].measured
    assert measured.keys() == expected.keys()
    residual = {"hessian_largest_residual"}  # rounding of a number near zero
    for name in measured.keys() - residual:
        assert measured[name] == pytest.approx(expected[name], rel=tolerance, abs=0.0), name


def test_a_run_that_was_stopped_keeps_its_measures(simulated: Simulated, tmp_path: Path) -> None:
    """Stopped after the second round, saved and continued: the measures of every round are those of one run."""
    with simulated(simulation=MEASURE) as simulation:
        expected = [result.measured for result in all_rounds(simulation)]
    with simulated(simulation=MEASURE) as simulation, RunSave(tmp_path, {}, 0.0) as save:
        rounds = save.rounds(simulation)
        assert isinstance(rounds, Iterator)
        assert [next(rounds).round, next(rounds).round] == [0, 1]
        rounds.close()
    with simulated(simulation=MEASURE) as simulation, RunSave(tmp_path, {}, 0.0) as save:
        results = list(continued(simulation, save))
        simulation.with_last_measures(results)
    assert [result.measured for result in results] == expected


def test_the_files_have_the_measures(table: MakeTable, tmp_path: Path) -> None:
    """rounds.csv has a column for each, empty where nothing was due; an ended run that is continued has the same."""
    job = Job(parse_simulation(table(simulation=MEASURE)), 0, tmp_path, save_every_s=0.0)
    simulate(job, lambda _: None)
    text = (tmp_path / "rounds.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert [bool(row["clients_training_accuracy_std"]) for row in rows] == [False, True, True]
    assert all(float(rows[-1][name]) > 0 for name in FLATNESS - {"hessian_largest_residual"})
    simulate(Job(job.config, 0, tmp_path, continues=True), lambda _: None)
    assert (tmp_path / "rounds.csv").read_text() == text


def test_the_sample_does_not_depend_on_the_partition(table: MakeTable) -> None:
    """Two partitions of one set have the same sample; a larger one than the set has all of it."""

    def inputs(seed: int, count: int) -> torch.Tensor:
        config = parse_simulation(table(simulation={"partition": {"method": "dirichlet", "alpha": 0.3}}))
        (part,) = sampled(prepare(config, seed).clients, count, 7)
        assert isinstance(part, Examples)
        return part.inputs

    assert torch.equal(inputs(1, 20), inputs(2, 20))
    assert len(inputs(1, 20)) == 20
    assert len(inputs(1, 10_000)) == len(inputs(2, 10_000)) < 10_000


def test_clients_with_data_of_their_own_are_sampled_too(table: MakeTable) -> None:
    """A held-out part keeps clients from sharing one set: examples come from each client by its size."""
    config = parse_simulation(table(task={"name": "points:Points", "options": {"part": 0.25}}))
    clients = prepare(config, 0).clients
    assert clients.whole is None
    assert sum(len(part) for part in sampled(clients, 25, 0)) == 25
    assert [len(part) for part in sampled(clients, 10_000, 0)] == [len(clients[client].train) for client in clients]


def test_batches_of_the_tasks_own_cannot_be_sampled(table: MakeTable) -> None:
    """The error says what is expected and what came."""
    clients: Mapping[str, LocalTask] = prepare(parse_simulation(table()), 0).clients
    own = Batched(lambda _: iter(()), 1, 5)
    replaced = {
        client: LocalTask("t", clients[client].task, clients[client].fingerprint, own, own) for client in clients
    }
    with pytest.raises(TaskError, match="drawn one by one, got batches of the task's own"):
        list(sampled(replaced, 3, 0))


def test_the_section_is_checked(table: MakeTable) -> None:
    """A wrong key is named with its place."""
    with pytest.raises(ValueError, match=r"simulation\.measure\.sharpness\.examples"):
        parse_simulation(table(simulation={"measure": {"sharpness": {"examples": 0}}}))
    assert MeasureSection().sharpness is None
