"""Built-in image tasks in a simulation, on files made here: LEAF's users as clients, pooled images, augmentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fl_ops.simulate.clients import prepare
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation
from tests.fl_tasks.built_in.cifar import write_cifar10
from tests.fl_tasks.built_in.leaf import PERSONS, WRITERS, write_celeba, write_femnist
from tests.marks import slow_except

BATCHED = EngineOptions(batched=BatchedOptions(strategy="one_by_one", group=3))


def run_of(task: str, options: dict[str, object], **sections: Any) -> dict[str, Any]:
    """Two rounds of three clients."""
    return {
        "name": "images",
        "task": {"name": task, "options": options},
        "algorithm": {"name": "fedcm"},
        "round": {"clients_per_round": 3},
        "local": {"learning_rate": 0.05, "batch_size": 4, "epochs": 1},
        "stop": {"rounds": 2},
        "simulation": {"partition": {"method": "natural"}},
        **sections,
    }


def simulated(engine: EngineOptions, content: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """The last model in one tensor, and the metrics of the last round."""
    config = parse_simulation(content)
    run = prepare(config, config.run.seed)
    with Simulation(run.config, run.clients, task=run.server_task, engine=engine) as simulation:
        last = list(simulation.rounds())[-1]
        assert simulation.ending == ("completed", simulation.ending[1] if simulation.ending else "")
        return torch.cat([value.double().flatten() for value in simulation.model().values()]), dict(last.metrics)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two models differ by rounding only."""
    return float((one - other).norm() / one.norm()) < 1e-5


@pytest.mark.parametrize("task", slow_except(["femnist", "celeba"], "femnist"))
def test_each_user_is_a_client(tmp_path: Path, task: str) -> None:
    """Without `clients` there are as many as users in LEAF's files, and each evaluates on its own test examples."""
    root = write_femnist(tmp_path) if task == "femnist" else write_celeba(tmp_path)
    model = "cnn-small" if task == "femnist" else "cnn"
    content = run_of(task, {"data_root": root, "model": model}, evaluation={"every": 1, "clients_every": 1})
    clients = prepare(parse_simulation(content), 0).clients
    sizes = list((WRITERS if task == "femnist" else PERSONS).values())
    assert [(len(local.train), len(local.held_out)) for local in clients.values()] == sizes
    (alone, measured), (together, measured_together) = simulated(SEQUENTIAL, content), simulated(BATCHED, content)
    assert close(alone, together)
    assert measured["clients_loss_mean"] == pytest.approx(measured_together["clients_loss_mean"], rel=1e-5)
    assert {"accuracy", "clients_accuracy_mean"} <= measured.keys()


def test_a_subset_of_users_by_a_seed_is_the_population(tmp_path: Path) -> None:
    """The option users draws the clients; N of the method is their number."""
    options = {"data_root": write_femnist(tmp_path), "model": "cnn-small", "users": 2, "users_seed": 3}
    content = run_of("femnist", options, algorithm={"name": "scaffold"}, round={"clients_per_round": 2})
    run = prepare(parse_simulation(content), 0)
    assert (len(run.clients), run.config.population) == (2, 2)


def cifar(root: Path, **options: object) -> dict[str, Any]:
    """A run on CIFAR-10 with three clients."""
    given = {"data_root": str(root), "model": "cnn-small", **options}
    return run_of("cifar10", given, simulation={"clients": 3, "partition": {"method": "iid"}})


def test_augmentation_is_switched_off_in_both_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without it the engines agree, and the models of the two differ; stating the default changes nothing."""
    write_cifar10(tmp_path, monkeypatch, each=8)
    usual, stated = (simulated(SEQUENTIAL, cifar(tmp_path, **given))[0] for given in ({}, {"augment": True}))
    off = simulated(SEQUENTIAL, cifar(tmp_path, augment=False))[0]
    assert torch.equal(usual, stated)
    assert not close(usual, off)
    assert close(usual, simulated(BATCHED, cifar(tmp_path))[0])
    assert close(off, simulated(BATCHED, cifar(tmp_path, augment=False))[0])


def test_clients_of_pooled_images_evaluate_on_their_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has the clients' metrics and no evaluation of the server, for which there are no images."""
    write_cifar10(tmp_path, monkeypatch, each=10)
    pooled = {"pooled": True, "client_eval_fraction": 0.25, "client_eval_seed": 0}
    content = {**cifar(tmp_path, **pooled), "evaluation": {"every": 0, "clients_every": 1}}
    clients = prepare(parse_simulation(content), 0).clients
    assert [(len(local.train), len(local.held_out)) for local in clients.values()] == [(15, 5)] * 3
    measured = simulated(SEQUENTIAL, content)[1]
    assert measured.keys() >= {"clients_accuracy_mean", "clients_accuracy_std"}
    assert "accuracy" not in measured
