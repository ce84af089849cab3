"""A client that sends noise in every round is excluded, also after a restart, and its rounds can be replayed."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from protos.fl.v1 import admin_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from tests.processes.federation import TASK, Fleet
from tests.processes.process import HERE, Workspace
from tests.processes.raw_client import RawClient

EVERYBODY = {"sampling": "bernoulli", "rate": 1.0, "clients_per_round": None, "min_clients": 2}


@pytest.fixture
def noisy_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Two daemons, and a coordinator that needs two refusals."""
    with Workspace(tmp_path) as workspace:
        yield Fleet(workspace, 2, quarantine={"after": 2})


def send_noise(client: RawClient, events: Iterator[pb.AttendResponse], rounds: int) -> None:
    """Answer this many assignments with infinities."""
    answered = 0
    while answered < rounds:
        event = next(events)
        if not event.HasField("assignment"):
            continue
        update = client.update(event.assignment)
        update.data = struct.pack("<f", math.inf) * (len(update.data) // 4)
        assert not client.submit(update.renamed_digest()).admitted
        answered += 1


def test_noise_is_quarantined_and_the_run_can_be_replayed(
    noisy_fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two refused updates the rounds continue without the client, also after SIGKILL. A replay gives the same."""
    monkeypatch.syspath_prepend(HERE)  # the daemons' task
    server = noisy_fleet.server
    with RawClient(server.address) as client:
        client.register()
        events = client.attend()
        server.create("noisy", round=EVERYBODY, stop={"rounds": 4})
        send_noise(client, events, 2)
        server.completed("noisy")
        left_out = server.client("raw-1")
        assert (left_out.quarantine.refusals, left_out.state) == (2, admin_pb2.CLIENT_STATE_PRESENT)
    assert [(each.accepted, each.dropped) for each in server.rounds("noisy")] == [(2, 1), (2, 1), (2, 0), (2, 0)]
    server.kill()
    server.serve()
    assert server.client("raw-1").quarantine == left_out.quarantine
    with server.admin() as admin:
        assert not admin.call(
            admin_pb2.ReleaseClientRequest(client_id="raw-1"), admin_pb2.ReleaseClientResponse
        ).client.HasField("quarantine")
    assert server.history("raw-1") == ["client_registered", "client_quarantined", "client_released"]
    assert "every model equals the ledger's bit for bit" in replayed(noisy_fleet, tmp_path / "configs")


def replayed(fleet: Fleet, folder: Path) -> str:
    """Output of `fl simulate --replay` for the run, with the daemons' data."""
    folder.mkdir()
    for daemon in fleet.daemons.values():
        (folder / daemon.config.name).write_text(daemon.config.read_text())
    config = folder.with_suffix(".toml")
    config.write_text(f'[task]\nname = "{TASK}"\n')
    state = str(fleet.server.settings["state_dir"])
    arguments = ["simulate", str(config), "--replay", "noisy", "--state-dir", state, "--client-configs", str(folder)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())
