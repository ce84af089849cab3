"""AdamW with a cosine schedule and warm-up in real processes: killed coordinator and daemon, simulation and replay.

Each of the three homes of the optimizer's state is covered: none, the device, and the server's mean. DiLoCo keeps the
state and the place in the data on the device, and has one schedule over the steps of all rounds.
"""

from __future__ import annotations

from typing import Any

import pytest

from fl_ops.errors import OpsError
from tests.processes.federation import Fleet
from tests.processes.process import HERE
from tests.processes.simulated import check_replay, simulated_digests

LOCAL: dict[str, Any] = {
    "learning_rate": 0.01,
    "epochs": 2,
    "schedule": {"kind": "cosine", "warmup": 0.2, "end": 0.1},
    "round_schedule": {"kind": "linear", "warmup": 0.25},
    "micro_batch_size": 5,
    "max_gradient_norm": 1.0,
}


@pytest.fixture(autouse=True)
def _task_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the daemons' task importable here."""
    monkeypatch.syspath_prepend(HERE)


DILOCO: dict[str, Any] = {
    "learning_rate": 0.01,
    "epochs": None,
    "steps": 7,
    "schedule": {"kind": "cosine", "warmup": 0.2, "end": 0.1, "over": "run"},
}


def sections(state: str, **more: Any) -> dict[str, Any]:
    """A run of FedAvg with AdamW, whose state is kept there; or of DiLoCo."""
    if state == "diloco":
        return {"algorithm": {"name": "diloco"}, "local": DILOCO, "stop": {"rounds": 5}, **more}
    optimizer = {"name": "adamw", "weight_decay": 0.01, "betas": [0.9, 0.99], "state": state}
    return {"algorithm": {"name": "fedavg"}, "local": {**LOCAL, "optimizer": optimizer}, "stop": {"rounds": 5}, **more}


@pytest.mark.slow
@pytest.mark.parametrize("state", ["fresh", "device", "server", "diloco"])
def test_adamw_survives_a_killed_coordinator_with_the_simulated_bits(fleet: Fleet, state: str) -> None:
    """The coordinator is killed after two of five rounds; run, simulation and replay have the same models."""
    name = f"adamw-{state}"
    fleet.server.create(name, **sections(state))
    fleet.server.until(name, lambda run: run.rounds_done >= 2, "two rounds are done")
    fleet.server.kill()
    fleet.server.serve()
    assert fleet.server.digests(name) == simulated_digests(name, **sections(state))
    check_replay(fleet.server, name)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["device", "server", "diloco"])
def test_a_killed_daemon_goes_on_from_the_state_that_counted(fleet: Fleet, state: str) -> None:
    """A daemon is killed while it trains in the third round and comes back. A replay has the same models."""
    name = f"killed-{state}"
    fleet.hold()
    fleet.server.create(name, **sections(state, round={"clients_per_round": 3}))
    fleet["edge-1"].logged("assignment", run=name, round=0)
    fleet["edge-1"].kill()
    fleet["edge-1"].start()
    fleet.release()
    fleet.server.until(name, lambda run: run.rounds_done >= 2, "two rounds are done")
    fleet["edge-2"].kill()
    fleet["edge-2"].start()
    fleet.server.completed(name)
    check_replay(fleet.server, name)


@pytest.mark.slow
def test_the_state_changes_the_models(fleet: Fleet) -> None:
    """A state that is kept, or averaged, gives other models from the second round on, and the same first one."""
    fresh, device, server = (
        simulated_digests(f"state-{state}", **sections(state)) for state in ("fresh", "device", "server")
    )
    assert fresh[0] == device[0] == server[0]
    assert len({fresh[1], device[1], server[1]}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "field", "why"),
    [
        ({"algorithm": {"name": "fedcm"}}, "local.optimizer", "mean gradient of a client's steps only for plain SGD"),
        ({"algorithm": {"name": "mfl"}}, "local.optimizer", "heavy-ball momentum, whose buffer the server averages"),
        ({"optimizer": {"name": "adam", "beta": 1.0}}, "local.optimizer", "unknown parameter of adam: 'beta'"),
        ({"optimizer": {"name": "adam", "lr": 1.0}}, "local.optimizer", "local.learning_rate is the learning rate"),
        ({"optimizer": {"name": "adam", "betas": [2.0, 0.9]}}, "local.optimizer", "Invalid beta parameter"),
        ({"optimizer": {"name": "adamm"}}, "local.optimizer", "Did you mean 'adam'"),
        ({"optimizer": {"name": "sgd", "weight_decay": 0.1, "state": "server"}}, "local.optimizer", "with momentum"),
        ({"optimizer": {"name": "torch.optim:LBFGS"}}, "local.optimizer", "many times in one step"),
        ({"optimizer": {"name": "other:Sgd", "state": "server"}}, "local.optimizer", "fresh or device for other:Sgd"),
    ],
)
def test_a_run_that_cannot_have_the_optimizer_is_refused(
    fleet: Fleet, changes: dict[str, Any], field: str, why: str
) -> None:
    """At its creation, with the field and the reason."""
    optimizer = changes.pop("optimizer", None)
    content = {**sections("fresh"), **changes}
    if optimizer is not None:
        content["local"] = {"optimizer": optimizer}
    with pytest.raises(OpsError) as refused:
        fleet.server.create("refused", **content)
    assert field in str(refused.value)
    assert why in str(refused.value)
