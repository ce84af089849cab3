"""A simulation of a run with privacy tells as little of the clients as its coordinator keeps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fl_ops.simulate.conftest import Simulated

RECORD = {
    "privacy": {"unit": "record", "noise_multiplier": 1.0, "clip": 0.5, "delta": 1e-5},
    "local": {"epochs": 2},
}
CLIENT = {
    "privacy": {"unit": "client", "noise_multiplier": 1.0, "clip": 0.5, "delta": 0.01, "max_epsilon": 100.0},
    "population": 4,
    "round": {"sampling": "bernoulli", "rate": 1.0},
    "local": {"epochs": 2},
}


@pytest.mark.parametrize("sections", [RECORD, CLIENT], ids=["record", "client"])
def test_no_loss_of_training_is_shown(simulated: Simulated, sections: dict[str, Any]) -> None:
    """The loss has no noise. The clients do train."""
    with simulated(algorithm={"name": "fedavg", "parameters": {"weights": "uniform"}}, **sections) as simulation:
        rounds = list(simulation.rounds())
    assert not simulation.failures
    assert len({done.digest for done in rounds}) == len(rounds) == 3
    assert all(done.accepted for done in rounds)
    assert [(done.training_loss, list(done.local_epochs)) for done in rounds] == [(None, [])] * 3
