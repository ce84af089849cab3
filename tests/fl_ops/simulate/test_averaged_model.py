"""The averaged model of a simulated run: its bits, its metrics beside those of the latest model, and its files."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import nn

import algorithms as fl
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.saving.save import RunSave
from fl_ops.simulate.seeds import Job, simulate
from fl_ops.simulate.settings import parse_simulation
from fl_server.errors import InvalidInput
from fl_tasks.evaluation import estimate_statistics, evaluate
from tests.fl_ops.simulate.conftest import MakeTable, Simulated, continued
from tests.marks import slow_except
from tests.processes.tiny_task import Tiny, batchnorm

ROUNDS = 7
RULES: dict[str, dict[str, Any]] = {
    "ema": {"method": "ema", "decay": 0.7},
    "tail": {"method": "tail", "start": 2},
    "window": {"method": "window", "window": 4},
}
STOP = {"rounds": ROUNDS}


def by_hand(models: list[dict[str, torch.Tensor]], averaging: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The mean of models in the order of their rounds: a float64 sum, rounded once."""
    decay, rounds = averaging.get("decay"), len(models)
    first = averaging.get("start", 0)
    if averaging["method"] == "window" and rounds > 4:  # of four: the sums restart in turn, every two rounds
        first = (rounds - 3) // 2 * 2
    keep, take = (1.0, 1.0) if decay is None else (decay, 1 - decay)
    sums = {name: tensor.double() * take for name, tensor in models[first].items()}
    for model in models[first + 1 :]:
        sums = {name: total * keep + model[name].double() * take for name, total in sums.items()}
    divisor = rounds - first if decay is None else 1 - decay**rounds
    return {name: (sums[name] / divisor).to(tensor.dtype) for name, tensor in models[0].items()}


@pytest.mark.parametrize("rule", RULES)
def test_it_is_the_float64_mean_of_the_committed_models(simulated: Simulated, rule: str) -> None:
    """In every round, bit for bit; before its start there is none, and no metric of it."""
    models, averages, metrics = [], [], []
    with simulated(averaging=RULES[rule], stop=STOP) as simulation:
        for done in simulation.rounds():
            models.append(simulation.model())
            averages.append(simulation.averaged_model())
            metrics.append(done.metrics)
    start = 2 if rule == "tail" else 0
    assert averages[:start] == [None] * start
    assert [sorted(each) for each in metrics[:start]] == [["accuracy", "loss"]] * start
    for round_ in range(start, ROUNDS):
        expected, averaged = by_hand(models[: round_ + 1], RULES[rule]), averages[round_]
        assert averaged is not None
        assert all(torch.equal(averaged[name], tensor) for name, tensor in expected.items())
        assert sorted(metrics[round_]) == ["accuracy", "averaged_accuracy", "averaged_loss", "loss"]


@pytest.mark.parametrize("name", slow_except(fl.names(), "scaffold", "mime"))
def test_every_method_has_one_and_does_not_read_it(simulated: Simulated, name: str) -> None:
    """The models are those of a run without it."""
    digests = []
    for averaging in ({}, {"averaging": RULES["ema"]}):
        with simulated(algorithm={"name": name}, stop={"rounds": 2}, **averaging) as simulation:
            digests.append([done.digest for done in simulation.rounds()])
            assert (simulation.averaged_model() is not None) == bool(averaging)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("engine", "tolerance"),
    [
        pytest.param(EngineOptions(2), 0.0, id="workers"),
        pytest.param(EngineOptions(batched=BatchedOptions()), 1e-5, id="batched"),
    ],
)
def test_other_engines(simulated: Simulated, engine: EngineOptions, tolerance: float) -> None:
    """Workers give the bits of the sequential engine, and the batched engine its values to a tolerance."""
    found = []
    for each in (SEQUENTIAL, engine):
        with simulated(each, averaging=RULES["window"], algorithm={"name": "fedavg"}) as simulation:
            results = list(simulation.rounds())
            found.append((simulation.averaged_model(), results[-1].metrics["averaged_loss"]))
    (expected, loss), (averaged, again) = found
    assert expected is not None
    assert averaged is not None
    for name, tensor in expected.items():
        torch.testing.assert_close(averaged[name], tensor, rtol=tolerance, atol=tolerance)
    assert again == pytest.approx(loss)


@pytest.mark.parametrize("rule", slow_except(RULES, "window"))
def test_a_run_that_is_continued_has_the_same_one(simulated: Simulated, tmp_path: Path, rule: str) -> None:
    """Stopped after each of its rounds and continued in a new simulation, whatever the scratch folder had."""
    with simulated(averaging=RULES[rule], stop=STOP) as simulation:
        metrics = [done.metrics for done in simulation.rounds()]
        expected = simulation.averaged_model()
    assert expected is not None
    results: list[RoundResult] = []
    for _ in range(ROUNDS):
        with simulated(averaging=RULES[rule], stop=STOP) as simulation, RunSave(tmp_path, {}, 0.0) as save:
            with closing(cast(Generator[RoundResult], continued(simulation, save))) as rounds:
                results = [next(rounds) for _ in range(len(results) + 1)]
            averaged = simulation.averaged_model()
    assert [done.metrics for done in results] == metrics
    assert averaged is not None
    assert all(torch.equal(averaged[name], tensor) for name, tensor in expected.items())


def test_its_metric_can_end_a_run(simulated: Simulated) -> None:
    """A rule by a metric of the averaged model waits for the first one: before, no evaluation counts."""
    stop = {"rounds": 6, "metric": "averaged_accuracy", "target": 0.01}
    with simulated(averaging={"method": "tail", "start": 2}, stop=stop) as simulation:
        assert len(list(simulation.rounds())) == 3
        assert simulation.ending is not None
        assert "averaged_accuracy reached" in simulation.ending[1]


def test_statistics_can_be_those_of_the_averaged_model(simulated: Simulated) -> None:
    """Means over the server's held-out examples in place of a mean of statistics; the parameters are equal."""
    task = {"name": "tests.processes.tiny_task:Tiny", "options": {"model": "batchnorm"}}
    found = {}
    for statistics in ("averaged", "estimated"):
        averaging = {**RULES["ema"], "statistics": statistics}
        with simulated(task=task, averaging=averaging, algorithm={"name": "fedavg"}) as simulation:
            results = list(simulation.rounds())
            model = simulation.averaged_model()
            assert model is not None
            metrics = {name: value for name, value in results[-1].metrics.items() if name.startswith("averaged_")}
            found[statistics] = model, metrics, [done.digest for done in results]
    (plain, before, digests), (model, after, again) = found["averaged"], found["estimated"]
    assert digests == again
    assert {name for name in plain if not torch.equal(plain[name], model[name])} == {"1.running_mean", "1.running_var"}
    module = batchnorm()
    module.load_state_dict(plain)
    held_out = Tiny("batchnorm").eval_data()
    estimate_statistics(Tiny("batchnorm"), module, held_out, 512)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in model.items())
    assert before != after
    assert after == {f"averaged_{name}": value for name, value in evaluate(Tiny(), module, held_out).items()}


def test_clients_evaluate_it_where_a_run_asks(simulated: Simulated) -> None:
    """All four clients measure both models on their own examples, and fetch both; training is the same."""
    sections: dict[str, Any] = {"averaging": RULES["ema"], "task": {"options": {"part": 0.25}}}
    results = {}
    for asks in (False, True):
        evaluation = {"every": 0, "clients_every": 1, "averaged_on_clients": asks}
        with simulated(**sections, evaluation=evaluation) as simulation:
            results[asks] = list(simulation.rounds())
            model, size = simulation.averaged_model(), simulation.federation.engine.layout.size_bytes
            clients = dict(simulation.federation.clients)
    assert model is not None
    module = nn.Linear(4, 3)
    module.load_state_dict(model)
    losses = [evaluate(each.task, module, each.held_out)["loss"] for each in clients.values()]
    last = results[True][-1].metrics
    assert last["clients_averaged_loss_mean"] == math.fsum(losses) / 4
    assert last["clients_averaged_loss_mean"] != last["clients_loss_mean"]
    for plain, both in zip(results[False], results[True], strict=True):
        assert plain.digest == both.digest
        assert plain.metrics == {name: each for name, each in both.metrics.items() if "averaged" not in name}
        assert both.bytes_down == plain.bytes_down + 4 * size


def test_its_file_names_what_it_holds(table: MakeTable, tmp_path: Path) -> None:
    """The folder of a run has both models, and each file's header says which one it is."""
    config = parse_simulation(table(averaging=RULES["ema"]))
    simulate(Job(config, 0, tmp_path), lambda _: None)
    held = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            held[path.name] = file.metadata()["holds"]
    assert held == {"model.safetensors": "committed", "averaged.safetensors": "averaged"}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        pytest.param({"averaging": {"method": "ema"}}, 'averaging.decay with method = "ema"', id="no-decay"),
        pytest.param({"averaging": {"method": "ema", "decay": 1.0}}, "less than 1", id="decay"),
        pytest.param({"averaging": {"method": "tail", "start": 1, "window": 4}}, "averaging.window", id="two-keys"),
        pytest.param({"averaging": {"method": "window", "window": 1}}, "greater than or equal to 2", id="window"),
        pytest.param({"averaging": {"method": "mean"}}, "'ema', 'tail' or 'window'", id="method"),
        pytest.param({"averaging": {"method": "tail", "start": 3}}, "under stop.rounds", id="start"),
        pytest.param({"stop": {"metric": "averaged_loss"}}, "expected the section averaging", id="no-section"),
        pytest.param(
            {"evaluation": {"clients_every": 1, "averaged_on_clients": True}},
            "evaluation.averaged_on_clients, got no section averaging",
            id="on-clients-without-one",
        ),
        pytest.param(
            {"evaluation": {"averaged_on_clients": True}, "averaging": RULES["ema"]},
            "evaluation.averaged_on_clients, got clients_every = 0",
            id="on-clients-never",
        ),
        pytest.param(
            {
                "evaluation": {"clients_every": 1},
                "averaging": RULES["ema"],
                "stop": {"metric": "clients_averaged_loss"},
            },
            "expected evaluation.averaged_on_clients with stop.metric",
            id="not-on-clients",
        ),
    ],
)
def test_settings_that_are_refused(table: MakeTable, sections: dict[str, Any], expected: str) -> None:
    """The message names the key and what was expected."""
    with pytest.raises((InvalidInput, ValueError), match=expected):
        parse_simulation(table(**sections))
