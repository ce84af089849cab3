"""Server updates of private runs: without noise and with all clients they are those of plain runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import algorithms as fl
from fl_server.aggregation.engine import Engine
from fl_tasks import load_task
from protos.codec import pack
from tests.fl_server.aggregation.test_engine import engine
from tests.fl_server.harness import TASK, run_config

CLIENTS, ROUNDS, STEPS = 3, 3, 4
UNIFORM = {"weights": "uniform"}
PLAIN = {"model": "plain"}
LOCAL = {"steps": STEPS, "learning_rate": 0.3, "learning_rate_decay": 0.9}
METHODS: list[dict[str, Any]] = [
    {"name": "fedavg", "parameters": UNIFORM},
    {"name": "fedcm"},
    {"name": "mofedsam"},
    {"name": "fedadam", "parameters": UNIFORM},
    {"name": "slowmo", "parameters": UNIFORM},
    {"name": "feddemon", "parameters": UNIFORM},
]
PRIVACY = {"unit": "client", "noise_multiplier": 1e-9, "clip": 100.0, "delta": 0.01, "max_epsilon": 1.0}


def private(method: dict[str, Any], **privacy: float) -> Engine:
    """A private run of all clients."""
    sections: dict[str, Any] = {
        "algorithm": method,
        "local": LOCAL,
        "round": {"sampling": "bernoulli", "rate": 1.0},
        "population": CLIENTS,
        "privacy": PRIVACY | privacy,
    }
    config = run_config(task={"name": TASK, "options": PLAIN}, **sections)
    return Engine(config, load_task(TASK, PLAIN), secret=bytes(32))


@pytest.mark.parametrize("method", METHODS, ids=[method["name"] for method in METHODS])
def test_without_noise_it_is_the_plain_update(tmp_path: Path, method: dict[str, Any]) -> None:
    """All clients, no noise to speak of, and a clip that nobody reaches: three rounds of models, momentum and all.

    Clients of the private run send their deltas without the direction's part, if the method has one.
    """
    run, numbers = private(method), torch.Generator().manual_seed(1)
    plain = engine("plain", algorithm=method, local=LOCAL)
    cohort = [fl.UpdateInfo(name, 7, STEPS) for name in "abc"]
    paths, rests = [tmp_path / info.client_id for info in cohort], [tmp_path / f"rest {name}" for name in "abc"]
    here, there = run.first(), plain.first()
    for _ in range(ROUNDS):
        centre = run._centre(here) or {}
        assert bool(centre) == (method["name"] in {"fedcm", "mofedsam"})
        for path, rest in zip(paths, rests, strict=True):
            delta = {name: torch.randn(x.shape, generator=numbers) for name, x in here.state.x.items()}
            path.write_bytes(pack(delta, run.layout))
            rest.write_bytes(pack({name: it - centre.get(name, 0.0) for name, it in delta.items()}, run.layout))
        here, _ = run.private_update(here, [(info, 1.0) for info in cohort], rests, 0)
        there, _ = plain.server_update(there, cohort, paths)
        for name, x in there.state.x.items():
            torch.testing.assert_close(here.state.x[name], x, rtol=1e-3, atol=1e-3)
        for symbol, tensors in there.state.memory.items():
            for name, value in tensors.items():
                torch.testing.assert_close(here.state.memory[symbol][name], value, rtol=1e-3, atol=1e-3)


def test_momentum_decays_in_a_round_without_updates(tmp_path: Path) -> None:
    """FedCM's direction is public: nobody comes, and Delta is (1 - alpha) times itself, which also moves the model."""
    run = private({"name": "fedcm", "parameters": {"alpha": 0.25}})
    path, first = tmp_path / "a", run.first()
    path.write_bytes(pack({name: torch.ones_like(x) for name, x in first.state.x.items()}, run.layout))
    before, _ = run.private_update(first, [(fl.UpdateInfo("a", 7, STEPS), 1.0)], [path], 0)
    after, _ = run.private_update(before, [], [], 0)
    rate = 0.3 * 0.9
    for name, delta in before.state.memory["Delta"].items():
        torch.testing.assert_close(after.state.memory["Delta"][name], 0.75 * delta, rtol=1e-3, atol=1e-3)
        moved = after.state.x[name] - before.state.x[name]
        torch.testing.assert_close(moved, -rate * STEPS * 0.75 * delta, rtol=1e-3, atol=1e-3)
