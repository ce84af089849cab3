"""A hostile member of a cohort cannot change the committed model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from protos.fl.v1 import admin_pb2
from protos.fl.v1.training_pb2 import (
    PAYLOAD_KIND_DELTA,
    PAYLOAD_KIND_FULL_GRADIENT,
    PayloadKind,
    RefusalReason,
    UpdateHeader,
)
from tests.chaos.points import KillOrders, order_path
from tests.hostile.federation import HONEST, SIZE, Federation
from tests.hostile.members import Lie, Member, lied, member
from tests.processes.federation import TASK, Daemon, SecureCoordinator
from tests.processes.process import HERE, Workspace, eventually
from tests.processes.raw_client import Tensors

MODEL = {"model": "batchnorm"}
TASK_OF_RUN = {"options": MODEL}
EVERYBODY = {"sampling": "bernoulli", "rate": 1.0, "clients_per_round": None, "min_clients": SIZE}
PLAIN: dict[str, Any] = {"name": "fedavg"}
CM = {"name": "fedcm", "parameters": {"alpha": 0.2}}
UNLIMITED = {"max_relative_norm": 0.0, "max_relative_payload": 0.0}


class KillableCoordinator(SecureCoordinator):
    """A coordinator that kills itself at a chosen point."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._module = "tests.chaos.server"
        self.orders = KillOrders(order_path(self.config))


class NormedFederation(Federation):
    """A federation with a model with buffers: means, variances, and a count of batches."""

    server_class = KillableCoordinator
    server: KillableCoordinator

    def _daemon(self, index: int) -> Daemon:
        daemon = super()._daemon(index)
        options = {**daemon.settings["task"]["options"], **MODEL, "step_s": 0.0}
        return Daemon(self.workspace, self.server, daemon.client_id, **_settings(daemon, options))


def _settings(daemon: Daemon, options: dict[str, Any]) -> dict[str, Any]:
    kept = {name: daemon.settings[name] for name in ("insecure", "tls", "shard", "labels")}
    return {**kept, "options": options}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NormedFederation]:
    """A coordinator that excludes a client after its second refused update in a row."""
    with Workspace(tmp_path_factory.mktemp("updates")) as workspace:
        yield NormedFederation(workspace, quarantine={"after": 2})


class Honest:
    """Runs of the honest daemons only, one for each method that a test needs."""

    def __init__(self, federation: NormedFederation) -> None:
        self._server = federation.server
        self._digests: dict[str, list[str]] = {}

    def digests(self, algorithm: dict[str, Any]) -> list[str]:
        """Of the models of the method's run."""
        method = str(algorithm["name"])
        if method not in self._digests:
            name = self._server.create(
                f"alone-{method}", task=TASK_OF_RUN, algorithm=algorithm, round=EVERYBODY, labels=HONEST
            )
            self._digests[method] = self._server.digests(name)
        return self._digests[method]


@pytest.fixture(scope="module")
def honest(federation: NormedFederation) -> Honest:
    """The runs to compare with."""
    return Honest(federation)


def everywhere(value: float, kind: PayloadKind = PAYLOAD_KIND_DELTA) -> Lie:
    """Set every trainable entry of a payload to this value."""

    def lie(header: UpdateHeader, payloads: dict[PayloadKind, Tensors]) -> None:
        for name, tensor in payloads[kind].items():
            if "running" not in name and tensor.is_floating_point():
                tensor.fill_(value)

    return lie


def buffer(name: str, value: float) -> Lie:
    """Set every entry of a buffer to this value; the trainable part stays correct."""

    def lie(header: UpdateHeader, payloads: dict[PayloadKind, Tensors]) -> None:
        payloads[PAYLOAD_KIND_DELTA][f"1.{name}"].fill_(value)

    return lie


def with_header(**values: int) -> Lie:
    """Set these values in the header."""

    def lie(header: UpdateHeader, payloads: dict[PayloadKind, Tensors]) -> None:
        for field, value in values.items():
            setattr(header, field, value)

    return lie


SLOW = pytest.mark.slow
CASES = [
    pytest.param(PLAIN, {}, everywhere(3e38), "NORM", id="fedavg-3e38"),
    pytest.param(CM, {}, everywhere(3e38), "NORM", id="fedcm-3e38", marks=SLOW),
    pytest.param(PLAIN, UNLIMITED, everywhere(3e38), "NOT_FINITE", id="overflow-without-limits", marks=SLOW),
    pytest.param(PLAIN, {}, everywhere(1e30), "NORM", id="1e30", marks=SLOW),
    pytest.param(PLAIN, {}, buffer("running_mean", 1e30), "NORM", id="buffers-1e30", marks=SLOW),
    pytest.param(PLAIN, {}, buffer("running_mean", 1e6), "RELATIVE_NORM", id="buffers-1e6", marks=SLOW),
    pytest.param(PLAIN, {}, buffer("running_var", -0.5), "NORM", id="negative-variance", marks=SLOW),
    pytest.param(PLAIN, {}, buffer("num_batches_tracked", 2**62), "NORM", id="count-of-batches", marks=SLOW),
    pytest.param(
        {"name": "mimelite"},
        {},
        everywhere(1e30, PAYLOAD_KIND_FULL_GRADIENT),
        "NORM",
        id="mimelite-gradient",
        marks=SLOW,
    ),
    pytest.param(PLAIN, {}, with_header(num_examples=2**53), "HEADER", id="examples"),
    pytest.param({"name": "fednova"}, {}, with_header(num_steps=2**31), "HEADER", id="steps", marks=SLOW),
]


@pytest.mark.parametrize(("algorithm", "limits", "lie", "reason"), CASES)
def test_a_false_update_does_not_enter_the_model(
    federation: NormedFederation,
    honest: Honest,
    request: pytest.FixtureRequest,
    algorithm: dict[str, Any],
    limits: dict[str, Any],
    lie: Lie,
    reason: str,
) -> None:
    """The run ends with the models of the honest daemons alone, bit for bit.

    The liar is quarantined, unless only the norms of other updates speak against it: then it is refused in each round.
    """
    name, expected = request.node.callspec.id, honest.digests(algorithm)
    with member(federation, f"liar-{name}", lie) as liar:
        federation.server.create(name, task=TASK_OF_RUN, algorithm=algorithm, round={**EVERYBODY, **limits})
        assert federation.server.digests(name) == expected
        if reason == "RELATIVE_NORM":
            status = federation.server.client(f"liar-{name}")
            assert (status.quarantine.refusals, status.updates_refused, status.updates_counted) == (0, 3, 0)
        else:
            refused_twice(federation, f"liar-{name}", liar, reason)
    assert [each.accepted for each in federation.server.rounds(name)] == [SIZE] * 3


def refused_twice(federation: NormedFederation, name: str, liar: Member, reason: str) -> None:
    """Two updates were refused, or dropped after the receipt, and the client is in quarantine."""
    status = federation.server.client(name)
    assert (status.quarantine.refusals, status.updates_refused, status.updates_counted) == (2, 2, 0)
    assert f"({reason.lower()})" in status.quarantine.reason
    reasons = {RefusalReason.Name(receipt.reason) for receipt in liar.receipts if not receipt.admitted}
    assert reasons <= {f"REFUSAL_REASON_{reason}"}


@pytest.mark.slow
@pytest.mark.parametrize("point", ["before culprit's refusal", "behind culprit's refusal"])
def test_a_coordinator_killed_between_the_drop_and_the_repeated_round(
    federation: NormedFederation, honest: Honest, tmp_path: Path, point: str
) -> None:
    """It restarts into the same round, drops no other client, and ends with the same bits, as does a replay."""
    name, expected = point.replace(" ", "-").replace("'", ""), honest.digests(PLAIN)
    federation.server.orders.kill_at(point, 1)
    with member(federation, f"liar-{name}", everywhere(3e38)):
        federation.server.create(name, task=TASK_OF_RUN, algorithm=PLAIN, round={**EVERYBODY, **UNLIMITED})
        eventually(lambda: federation.server.orders.executed, "it kills itself")
        federation.server.wait()
        federation.server.serve()
        assert federation.server.digests(name) == expected
    assert federation.server.history(name).count("culprit_dropped") in (1, 2)
    assert "every model equals the ledger's bit for bit" in replayed(federation, name, tmp_path)


def replayed(federation: NormedFederation, run: str, folder: Path) -> str:
    """Output of `fl simulate --replay` for a run, with the daemons' own data."""
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
def _task_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the daemons' task importable for a replay."""
    monkeypatch.syspath_prepend(HERE)


def test_a_diverged_run_is_resumed(federation: Federation) -> None:
    """Its reason names the command, which lets it complete from its last model, with another learning rate."""
    server, wild = federation.server, {"name": "fedavgm", "parameters": {"eta_g": 1e38}}
    run = server.create("diverged", task=TASK_OF_RUN, algorithm=wild, round={"clients_per_round": 2}, labels=HONEST)
    failed = server.ended(run)
    assert failed.state == admin_pb2.RUN_STATE_FAILED
    assert "`fl run resume diverged --learning-rate " in failed.reason
    with server.admin() as admin:
        admin.runs.resume_run(run, 1e-38)
    ended = server.completed(run)
    assert ended.rounds_done == 3
    assert [change.learning_rate for change in ended.spec.local.learning_rate_changes] == [1e-38]
    assert "run_resumed" in server.history(run)


def test_examples_weigh_no_more_than_the_share(federation: Federation) -> None:
    """A client that registers and reports 2^53 examples is admitted with the limit's half of the weight."""
    name = "liar-of-weight"

    def lie(header: UpdateHeader, payloads: dict[PayloadKind, Tensors]) -> None:
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
        with federation.server.admin() as admin:
            admin.clients.forget_client(name)  # otherwise the next run draws it, and waits for it
    assert federation.server.rounds("shares")[0].accepted == SIZE + 1
    assert federation.server.events("weights_capped", run="shares")[0]["clients"] == [name]
    assert torch.isfinite(torch.tensor(federation.server.rounds("shares")[0].metrics["loss"]))
