"""Every method over the wire."""

from __future__ import annotations

import pytest

import algorithms as fl
from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.marks import slow_except
from tests.processes.federation import Fleet


@pytest.mark.parametrize("name", slow_except(fl.names(), "fedavg"))
def test_a_run_can_use_the_method(fleet: Fleet, name: str) -> None:
    """Two rounds are committed, and each moves the model."""
    run = fleet.server.create(f"with-{name}", algorithm={"name": name}, stop={"rounds": 2}, population=3)
    assert fleet.server.completed(run).state == admin_pb2.RUN_STATE_COMPLETED
    assert len(set(fleet.server.digests(run))) == 2


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_a_method_that_needs_the_population_is_refused_without(fleet: Fleet, name: str) -> None:
    """At creation, with the key to add."""
    with pytest.raises(OpsError, match=f"population: expected N, the clients that the run may ever.*{name} needs it"):
        fleet.server.create(f"without-{name}", algorithm={"name": name})


@pytest.mark.parametrize(("eta_g", "words"), [(1e38, "is not finite"), (1e39, "overflows")])
def test_a_method_with_bad_parameters_ends_in_a_clear_state(fleet: Fleet, eta_g: float, words: str) -> None:
    """A rate without measure: the run fails at the first aggregate that is not finite; the model before it stays."""
    run = fleet.server.create(
        f"wild-{words[-4:]}", algorithm={"name": "fedavgm", "parameters": {"eta_g": eta_g}}, stop={"rounds": 9}
    )
    ended = fleet.server.ended(run)
    assert ended.state == admin_pb2.RUN_STATE_FAILED
    assert words in ended.reason
    assert "the first model stays" in ended.reason
    assert fleet.server.rounds(run) == []


def test_training_that_diverges_on_every_device_ends_the_run(fleet: Fleet) -> None:
    """No client has a finite update, so there is no aggregate: the run fails with that reason."""
    local = {"epochs": 1, "batch_size": 16, "learning_rate": 1e38}
    run = fleet.server.create("explodes", algorithm={"name": "fedavg"}, local=local, stop={"rounds": 9})
    ended = fleet.server.ended(run)
    assert ended.state == admin_pb2.RUN_STATE_FAILED
    assert "clients got values that are not finite in round 0" in ended.reason


def test_parts_of_different_papers_make_one_run(fleet: Fleet) -> None:
    """FedCM's correction at the SAM point, stepped by Adam: a method that no paper has."""
    parameters = {"alpha": 0.5, "gradient": "sam", "rho": 0.05, "server_optimizer": "adam", "server_beta1": 0.5}
    run = fleet.server.create("mixed", algorithm={"name": "fedcm", "parameters": parameters}, stop={"rounds": 2})
    assert fleet.server.completed(run).rounds_done == 2
