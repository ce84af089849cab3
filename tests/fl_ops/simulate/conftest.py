"""A small run as the content of a file, and its simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

import pytest

from fl_client.training.data import LocalTask
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.saving.save import RunSave
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation
from tests.skipping import suited

RUN: dict[str, Any] = {
    "task": {"name": "points:Points"},
    "algorithm": {"name": "fedcm"},
    "local": {"learning_rate": 0.2, "batch_size": 8},
    "round": {"clients_per_round": 2},
    "stop": {"rounds": 3},
    "simulation": {"clients": 4, "names": "c{index}"},
}

Table = dict[str, Any]
MakeTable = Callable[..., Table]
Simulated = Callable[..., AbstractContextManager[Simulation]]


def continued(simulation: Simulation, save: RunSave) -> Iterator[RoundResult]:
    """All rounds of a run: those of the save, then the others, saved at times."""
    earlier = save.restore(simulation)
    yield from earlier
    yield from save.rounds(simulation, earlier)


@pytest.fixture(autouse=True)
def _importable_task(points_task: None) -> None:
    """All of these tests use the task points:Points."""


@pytest.fixture
def table() -> MakeTable:
    """Makes the run's table, with some keys of some sections changed."""

    def make(**sections: Any) -> Table:
        content = deepcopy(RUN)
        for name, value in sections.items():
            content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
        return suited(content, content["simulation"]["clients"])

    return make


@pytest.fixture
def simulated(table: MakeTable) -> Simulated:
    """Simulates that run, with this engine. replaced: clients with another task or data, by id."""

    @contextmanager
    def make(
        engine: EngineOptions = SEQUENTIAL, replaced: Mapping[str, LocalTask] | None = None, **sections: Any
    ) -> Iterator[Simulation]:
        config = parse_simulation(table(**sections))
        run = prepare(config, config.run.seed)
        clients = {**run.clients, **replaced} if replaced else run.clients
        simulation = Simulation(
            run.config,
            clients,
            task=run.server_task,
            engine=engine,
            devices=run.devices,
            digests=config.simulation.digests,
            measure=config.simulation.measure,
        )
        with simulation:
            yield simulation

    return make
