"""Clients whose updates are long for a good reason, in runs that have converged, with the default limits of norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.updates import Contribution
from fl_server.run.assignments import RoundPosition
from fl_server.run_settings.config import RunConfig
from fl_tasks import Shard
from tests.processes.process import HERE
from tests.processes.quadratic_task import EXAMPLES, Quadratic

CLIENTS = "abcdef"
PARTS = dict(zip(CLIENTS, torch.arange(EXAMPLES).chunk(len(CLIENTS)), strict=True))
CONVERGED = 15
"""Rounds after which updates are a thousand times shorter than at the start."""


class Rounds:
    """The rounds of one run, each of all clients that are present."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._round = 0

    def run(self, count: int, clients: Sequence[str]) -> None:
        """Train `count` rounds with these clients. Every update must be admitted and count."""
        federation = self._federation
        for _ in range(count):
            for exchange in range(len(federation.engine.algorithm.exchanges)):
                done = list(federation.work(RoundPosition(self._round, exchange, 0, 60.0), list(clients)))
                assert [one for one in done if not isinstance(one, Contribution)] == []
                assert federation.culprits(federation.accepted(exchange, clients)) == ()
            federation.step(clients)
            federation.commit(clients)
            self._round += 1

    @property
    def error(self) -> float:
        """Distance of the latest model to the optimum of all examples."""
        a, b = Quadratic().train_data(Shard()).targets.unbind(dim=1)
        best = (a * b).sum(dim=0) / a.sum(dim=0)
        return float(torch.linalg.vector_norm(self._federation.snapshot.state.x["y"] - best))


SCAFFOLD: dict[str, Any] = {"name": "scaffold"}
SCAFFOLD_I: dict[str, Any] = {"name": "scaffold", "parameters": {"option": "I"}}
FEDDYN: dict[str, Any] = {"name": "feddyn", "parameters": {"alpha": 1.0}}
CASES = [
    pytest.param(SCAFFOLD, "refuse", id="scaffold"),
    pytest.param(SCAFFOLD, "clip", id="scaffold-clip", marks=pytest.mark.slow),
    pytest.param(SCAFFOLD_I, "refuse", id="scaffold-I", marks=pytest.mark.slow),
    pytest.param(SCAFFOLD_I, "clip", id="scaffold-I-clip", marks=pytest.mark.slow),
    pytest.param(FEDDYN, "refuse", id="feddyn", marks=pytest.mark.slow),
    pytest.param(FEDDYN, "clip", id="feddyn-clip", marks=pytest.mark.slow),
]


@pytest.mark.slow  # the same optimum without clients that come and go: algorithms/test_rounds
@pytest.mark.parametrize(("algorithm", "over"), CASES)
def test_a_client_that_joins_returns_or_lost_its_state_counts(
    monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], over: str
) -> None:
    """Two join a run that has converged without them, one comes back, the states restart: the optimum is reached."""
    monkeypatch.syspath_prepend(HERE)
    task = "quadratic_task:Quadratic"
    config = RunConfig.model_validate(
        {
            "name": "r", "task": {"name": task}, "algorithm": algorithm, "population": len(CLIENTS),
            "local": {"epochs": 8, "batch_size": EXAMPLES, "learning_rate": 0.1},
            "round": {"clients_per_round": len(CLIENTS), "quorum": 3, "over_relative_norm": over},
        }
    )  # fmt: skip
    clients = SimulatedClients(task, Quadratic(), PARTS)
    with Federation(config, Quadratic(), clients) as federation:
        rounds = Rounds(federation)
        rounds.run(3, "abcd")
        rounds.run(CONVERGED, "bcd")  # the first is away
        rounds.run(CONVERGED, CLIENTS)
        federation.restart_states(1)
        rounds.run(2 * CONVERGED, CLIENTS)
        assert rounds.error < 1e-5
