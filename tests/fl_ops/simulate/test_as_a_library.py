"""`algorithms.run_round` and a simulation, which runs the coordinator's and the daemon's code, have the same bits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import algorithms as fl
from fl_ops.simulate.clients import PreparedRun, prepare
from fl_ops.simulate.engines.client_work import one_thread
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation
from fl_server.aggregation.methods import local_in
from fl_server.rounds.sampling import training_seed
from fl_tasks.batches import batches, ordered_batches, seed_everything
from tests.fl_ops.simulate.conftest import MakeTable
from tests.marks import slow_except

NAMES = [*fl.names(), "scaffold-I", "scaffold-examples", "fedrobust-matrix"]
SETTINGS = fl.LocalSettings(0.05, weight_decay=0.01, max_gradient_norm=1.0)
TABLE: dict[str, Any] = {
    "local": {"learning_rate": 0.05, "batch_size": 6, "weight_decay": 0.01, "max_gradient_norm": 1.0},
    "round": {"clients_per_round": 3},
    "simulation": {"clients": 5, "partition": {"method": "dirichlet", "alpha": 1.0, "sigma": 0.4}},
    "evaluation": {"every": 0},
}


def participant(run: PreparedRun, algorithm: fl.Algorithm, client: str, t: int) -> fl.Participant:
    """A client with the data, batches and random numbers that a daemon has."""
    local, seed, size = run.clients[client], training_seed(run.config.seed, t, client), run.config.local.batch_size
    work = local_in(run.config, algorithm, t)

    def data(exchange: int) -> fl.LocalData:
        seed_everything(seed)
        return fl.LocalData(
            batches(local.train, size, seed, epochs=work.epochs, steps=work.steps),
            ordered_batches(local.train, size),
            local.task.loss,
        )

    return fl.Participant(client, len(local.train), data)


@pytest.mark.parametrize(
    ("name", "task"),
    slow_except(
        product(NAMES, ("NormedPoints", "LowPoints")),
        ("fedavg", "NormedPoints"),
        ("fedcm", "LowPoints"),
        ("scaffold-I", "NormedPoints"),
        ("mime", "LowPoints"),
    ),
)
def test_run_round_has_the_bits_of_a_simulation(table: MakeTable, name: str, task: str) -> None:
    """Model, buffers and server memory after each of three rounds with three of five clients of unequal sizes."""
    method, _, option = name.partition("-")
    parameters = {"I": {"option": "I"}, "examples": {"objective": "examples"}, "matrix": {"L": "matrix"}}.get(
        option, {}
    )
    plain = {"optimizer": {"name": "sgd"}, "continue_data": False} if method == "diloco" else {}
    changed = {**TABLE, "local": {**TABLE["local"], **plain}}
    config = parse_simulation(
        table(**changed, task={"name": f"points:{task}"}, algorithm={"name": method, "parameters": parameters})
    )
    run = prepare(config, 3)
    algorithm = fl.build(method, **parameters)
    with Simulation(run.config, run.clients, task=run.server_task) as simulation, one_thread():
        first = simulation.snapshot
        model = run.server_task.model()
        fl.load_state(model, fl.ModelState(first.parameters, first.buffers, {}))
        state = fl.start_run(algorithm, model)
        for done in simulation.rounds():
            info = fl.RoundInfo(
                done.round,
                0.05,
                rounds=3,
                population=run.config.population or None,
                population_examples=run.config.population_examples or None,
            )
            cohort = [participant(run, algorithm, client, done.round) for client in reversed(done.accepted)]
            result = fl.run_round(algorithm, state, model, cohort, SETTINGS, info)
            state, other = result.state, simulation.snapshot
            assert len(cohort) == run.config.round.clients_per_round
            torch.testing.assert_close(dict(other.state.x), dict(state.server.x), rtol=0, atol=0)
            torch.testing.assert_close(dict(other.buffers), dict(state.buffers), rtol=0, atol=0)
            torch.testing.assert_close(dict(other.state.memory), dict(state.server.memory), rtol=0, atol=0)
            assert done.training_loss == pytest.approx(sum(result.losses.values()) / len(cohort))
    assert done.round == 2
