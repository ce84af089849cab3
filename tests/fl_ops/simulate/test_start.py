"""A run with plain SGD does not load torch's compiler, which takes seconds and memory. Any optimizer of torch does."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation

RUN: dict[str, Any] = {
    "task": {"name": "tests.processes.tiny_task:Tiny"},
    "algorithm": {"name": "fedavg"},
    "stop": {"rounds": 1},
    "simulation": {"clients": 2},
}


def simulate(optimizer: dict[str, Any] | None, result: Path) -> None:
    """Simulate the run in this process, and write whether the compiler is loaded."""
    local = {"learning_rate": 0.1, "steps": 1, **({} if optimizer is None else {"optimizer": optimizer})}
    prepared = prepare(parse_simulation({**RUN, "local": local}), 0)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulation:
        done = [done.round for done in simulation.rounds()]
    assert done == [0]
    result.write_text(str("torch._dynamo" in sys.modules))


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "loaded"), [(None, "False"), ({"name": "adamw"}, "True")])
def test_only_an_optimizer_of_torch_loads_its_compiler(
    tmp_path: Path, optimizer: dict[str, Any] | None, loaded: str
) -> None:
    """In a new process, whose coordinator's part and clients' part make a whole run."""
    process = multiprocessing.get_context("spawn").Process(target=simulate, args=(optimizer, tmp_path / "loaded"))
    process.start()
    process.join()
    assert (process.exitcode, (tmp_path / "loaded").read_text()) == (0, loaded)
