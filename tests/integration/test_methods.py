"""Every method that a run can use, over the wire; every other one refused with the reason."""

from __future__ import annotations

import pytest

import algorithms as fl
from fl_ops.errors import OpsError
from fl_server.engine import require_one_delta
from protos.fl.v1 import admin_pb2


def usable(name):
    """Whether a run can use the method."""
    try:
        require_one_delta(fl.build(name))
    except fl.AlgorithmError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name in fl.names() if usable(name)])
def test_a_run_can_use_the_method(fleet, name):
    """Two rounds are committed, and each moves the model."""
    run = fleet.server.create(f"with-{name}", algorithm={"name": name}, stop={"rounds": 2})
    assert fleet.server.completed(run).state == admin_pb2.RUN_STATE_COMPLETED
    assert len(set(fleet.server.digests(run))) == 2


@pytest.mark.parametrize("name", [name for name in fl.names() if not usable(name)])
def test_a_method_that_asks_for_more_is_refused(fleet, name):
    """When the run is created, in words that say what the method's clients would send and keep."""
    with pytest.raises(OpsError, match=f"whose clients send one delta a round and keep nothing, got {name}"):
        fleet.server.create(f"with-{name}", algorithm={"name": name})


def test_parts_of_different_papers_make_one_run(fleet):
    """FedCM's correction at the SAM point, stepped by Adam: a method that no paper has."""
    parameters = {"alpha": 0.5, "gradient": "sam", "rho": 0.05, "server_optimizer": "adam", "server_beta1": 0.5}
    run = fleet.server.create("mixed", algorithm={"name": "fedcm", "parameters": parameters}, stop={"rounds": 2})
    assert fleet.server.completed(run).rounds_done == 2
