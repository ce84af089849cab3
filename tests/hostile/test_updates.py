"""What one hostile member of a cohort can do to the model: nothing that is left in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_ops.cli import app
from protos.fl.v1 import admin_pb2
from protos.fl.v1.training_pb2 import PAYLOAD_KIND_DELTA, PAYLOAD_KIND_FULL_GRADIENT, RefusalReason
from tests.chaos.points import Orders, order_beside
from tests.hostile.federation import HONEST, SIZE, Federation, SecureCoordinator
from tests.hostile.members import Member, lied, member
from tests.integration.harness import TASK, Daemon
from tests.integration.processes import Place, eventually

MODEL = {"model": "batchnorm"}
TASK_OF_RUN = {"options": MODEL}
EVERYBODY = {"sampling": "bernoulli", "rate": 1.0, "clients_per_round": None, "min_clients": SIZE}
PLAIN = {"name": "fedavg"}
CM = {"name": "fedcm", "parameters": {"alpha": 0.2}}
UNLIMITED = {"max_relative_norm": 0.0, "max_relative_payload": 0.0}


class MortalCoordinator(SecureCoordinator):
    """One that can be ordered to die at a point."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._module = "tests.chaos.server"
        self.orders = Orders(order_beside(self.config))


class NormedFederation(Federation):
    """Its model has buffers: means, variances, and a count of batches."""

    server_class = MortalCoordinator

    def _daemon(self, index: int) -> Daemon:
        daemon = super()._daemon(index)
        options = {**daemon.settings["task"]["options"], **MODEL, "step_s": 0.0}
        return Daemon(self.place, self.server, daemon.client_id, **_settings(daemon, options))


def _settings(daemon: Daemon, options: dict[str, Any]) -> dict[str, Any]:
    kept = {name: daemon.settings[name] for name in ("insecure", "tls", "shard", "labels")}
    return {**kept, "options": options}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NormedFederation]:
    """A coordinator that leaves a client out for its second refused update in a row."""
    with Place(tmp_path_factory.mktemp("updates")) as place:
        yield NormedFederation(place, quarantine={"after": 2})


@pytest.fixture(scope="module")
def honest(federation: NormedFederation) -> dict[str, list[str]]:
    """By method: digests of the models that the honest daemons make without anybody else."""
    digests = {}
    for algorithm in (PLAIN, CM, {"name": "mimelite"}, {"name": "fednova"}):
        name = federation.server.create(
            f"alone-{algorithm['name']}", task=TASK_OF_RUN, algorithm=algorithm, round=EVERYBODY, labels=HONEST
        )
        digests[algorithm["name"]] = federation.server.digests(name)
    return digests


def everywhere(value: float, kind: int = PAYLOAD_KIND_DELTA):
    """The trainable part of a payload is this value in every entry."""

    def lie(header, payloads):
        for name, tensor in payloads[kind].items():
            if "running" not in name and tensor.is_floating_point():
                tensor.fill_(value)

    return lie


def buffer(name: str, value: float):
    """A buffer is this value in every entry; what is trained is as it should be."""

    def lie(header, payloads):
        payloads[PAYLOAD_KIND_DELTA][f"1.{name}"].fill_(value)

    return lie


def says(**values: int):
    """The header has these values."""

    def lie(header, payloads):
        for field, value in values.items():
            setattr(header, field, value)

    return lie


CASES = [
    pytest.param(PLAIN, {}, everywhere(3e38), "NORM", id="fedavg-3e38"),
    pytest.param(CM, {}, everywhere(3e38), "NORM", id="fedcm-3e38"),
    pytest.param(PLAIN, UNLIMITED, everywhere(3e38), "NORM", id="overflow-without-limits"),
    pytest.param(PLAIN, {}, everywhere(1e30), "NORM", id="1e30"),
    pytest.param(PLAIN, {}, buffer("running_mean", 1e30), "NORM", id="buffers-1e30"),
    pytest.param(PLAIN, {}, buffer("running_mean", 1e6), "NORM", id="buffers-1e6"),
    pytest.param(PLAIN, {}, buffer("running_var", -0.5), "NORM", id="negative-variance"),
    pytest.param(PLAIN, {}, buffer("num_batches_tracked", 2**62), "NORM", id="count-of-batches"),
    pytest.param(
        {"name": "mimelite"}, {}, everywhere(1e30, PAYLOAD_KIND_FULL_GRADIENT), "NORM", id="mimelite-gradient"
    ),
    pytest.param(PLAIN, {}, says(num_examples=2**53), "HEADER", id="examples"),
    pytest.param({"name": "fednova"}, {}, says(num_steps=2**31), "HEADER", id="steps"),
]


@pytest.mark.parametrize(("algorithm", "limits", "lie", "reason"), CASES)
def test_a_lie_is_left_out_of_the_model(federation, honest, request, algorithm, limits, lie, reason):
    """The run ends with the models of the honest daemons alone, bit for bit, and the liar is quarantined."""
    name = request.node.callspec.id
    with member(federation, f"liar-{name}", lie) as liar:
        federation.server.create(name, task=TASK_OF_RUN, algorithm=algorithm, round={**EVERYBODY, **limits})
        assert federation.server.digests(name) == honest[algorithm["name"]]
        refused_twice(federation, f"liar-{name}", liar, reason)
    assert [each.accepted for each in federation.server.rounds(name)] == [SIZE] * 4


def refused_twice(federation: NormedFederation, name: str, liar: Member, reason: str) -> None:
    """It was told so, or dropped from the round after its receipt; and it is left out since."""
    status = federation.server.client(name)
    assert (status.quarantine.refusals, status.updates_refused, status.updates_counted) == (2, 2, 0)
    assert f"({reason.lower()})" in status.quarantine.reason
    told = {RefusalReason.Name(receipt.reason) for receipt in liar.receipts if not receipt.admitted}
    assert told <= {f"REFUSAL_REASON_{reason}"}


@pytest.mark.parametrize("point", ["before culprit's refusal", "behind culprit's refusal"])
def test_a_coordinator_killed_between_the_drop_and_the_repeated_round(federation, honest, tmp_path, point):
    """It starts again into the same round, drops nobody else, and ends with the same bits; a replay agrees."""
    name = point.replace(" ", "-").replace("'", "")
    federation.server.orders.die(point, 1)
    with member(federation, f"liar-{name}", everywhere(3e38)):
        federation.server.create(name, task=TASK_OF_RUN, algorithm=PLAIN, round=EVERYBODY)
        eventually(lambda: federation.server.orders.obeyed, "it kills itself")
        federation.server.wait()
        federation.server.serve()
        assert federation.server.digests(name) == honest["fedavg"]
    assert federation.server.history(name).count("culprit_dropped") in (1, 2)
    assert "every model the ledger's bit for bit" in replayed(federation, name, tmp_path)


def replayed(federation: NormedFederation, run: str, folder: Path) -> str:
    """What `fl simulate --replay` says of a run, with the daemons' own data."""
    configs = folder / "configs"
    configs.mkdir()
    for daemon in federation.daemons.values():
        (configs / daemon.config.name).write_text(daemon.config.read_text())
    config = folder / "run.toml"
    config.write_text(f'[task]\nname = "{TASK}"\noptions = {{ model = "batchnorm" }}\n')
    state = str(federation.server.settings["state_dir"])
    arguments = ["simulate", str(config), "--replay", run, "--state-dir", state, "--client-configs", str(configs)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _task_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemons' task can be imported here too."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "integration")


def test_a_run_that_diverged_goes_on(federation):
    """Its reason names the command, which lets it complete from its last model, with another learning rate."""
    server, wild = federation.server, {"name": "fedavgm", "parameters": {"eta_g": 1e38}}
    run = server.create("diverged", task=TASK_OF_RUN, algorithm=wild, round={"clients_per_round": 2}, labels=HONEST)
    failed = server.ended(run)
    assert failed.state == admin_pb2.RUN_STATE_FAILED
    assert "`fl run resume diverged --learning-rate " in failed.reason
    with server.admin() as admin:
        admin.resume_run(run, 1e-38)
    ended = server.completed(run)
    assert ended.rounds_done == 4
    assert [change.learning_rate for change in ended.spec.local.learning_rate_changes] == [1e-38]
    assert "run_resumed" in server.history(run)


def test_examples_weigh_no_more_than_the_share(federation):
    """Who registers 2^53 examples and says so is admitted, and has half of the weight where that is the limit."""
    name = "liar-of-weight"

    def lie(header, payloads):
        header.num_examples = 2**53
        header.num_steps = 1
        everywhere(0.0)(header, payloads)

    with federation.raw(name) as client:
        offer = client.hello().tasks[0]
        offer.train_examples = 2**53
        client.register(tasks=[offer])
        events = client.attend()
        shares = {"max_client_share": 0.5, "min_clients": SIZE + 1}
        sections = {"round": {**EVERYBODY, **shares}, "local": {"steps": 1, "epochs": None}, "stop": {"rounds": 1}}
        federation.server.create("shares", task=TASK_OF_RUN, algorithm=PLAIN, **sections)
        receipt = client.submit(lied(client, next(e for e in events if e.HasField("assignment")).assignment, lie))
        assert receipt.admitted
        federation.server.completed("shares")
    assert federation.server.rounds("shares")[0].accepted == SIZE + 1
    assert federation.server.events("weights_capped", run="shares")[0]["clients"] == [name]
    assert torch.isfinite(torch.tensor(federation.server.rounds("shares")[0].metrics["loss"]))
