"""A run of private steps in real processes: killed and resumed, with the bits of a simulation that has the secrets."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from fl_client.privacy.account import FILE, Account, read_account, write_account
from fl_client.setup import commands
from fl_common.privacy.accountant import Mechanism
from fl_ops.simulate.engines.client_work import simulated_secret
from protos.fl.v1 import admin_pb2
from tests.processes.federation import Daemon, Fleet
from tests.processes.process import HERE, Workspace, eventually
from tests.processes.simulated import replay, simulated_digests

PRIVACY = {"unit": "record", "noise_multiplier": 1.5, "clip": 0.5, "delta": 1e-5}
ROUNDS, STEPS, EXAMPLES, BATCH = 2, 4, 64, 16


class KnownSecrets(Fleet):
    """Daemons whose accounts were made by the test, with the secrets of a simulation."""

    def daemon(self, index: int, size: int) -> Daemon:
        """See Fleet."""
        daemon = super().daemon(index, size)
        folder = folder_of(daemon)
        folder.mkdir(mode=0o700)
        write_account(folder / FILE, Account(simulated_secret(daemon.name)))
        return daemon


def folder_of(daemon: Daemon) -> Path:
    """A daemon's state directory."""
    return Path(daemon.settings["state_dir"])


def test_a_killed_run_has_the_simulated_bits_and_is_charged_for_all_that_it_sent(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon dies in its second step and trains again: the same noise. No account is under what its device sent."""
    monkeypatch.syspath_prepend(HERE)
    fleet = KnownSecrets(workspace, 3)
    local = {"epochs": None, "steps": STEPS, "batch_size": BATCH}
    _, slow = fleet.half_delivered("private-records", privacy=PRIVACY, local=local, stop={"rounds": ROUNDS})
    slow.logged("privacy_charged", run="private-records", round=0)
    slow.kill()
    fleet.server.kill()
    fleet.server.serve()
    slow.start()
    slow.hold.unlink()
    digests = fleet.server.digests("private-records")
    assert digests == simulated_digests("private-records", privacy=PRIVACY, local=local, stop={"rounds": ROUNDS})
    assert len(set(digests)) == ROUNDS
    for daemon in fleet.daemons.values():
        account = read_account(folder_of(daemon) / FILE)
        assert account is not None
        sent = len(daemon.events("submitted", run="private-records"))
        assert account.spent == ({Mechanism(1.5, BATCH / EXAMPLES): sent * STEPS} if sent else {})
    with fleet.server.admin() as admin:
        order = admin_pb2.CLIENT_ORDER_EPSILON
        shown = {client.client_id: client.work for client in admin.clients.list_clients(order=order)}
        stated = admin.runs.get_run("private-records", newest=0).run.stated_privacy
    all_stated = [work.epsilon for work in shown.values() if work.HasField("epsilon")]
    assert all_stated == sorted(all_stated, reverse=True)
    assert (stated.clients, stated.largest, stated.delta) == (len(all_stated), all_stated[0], 1e-5)
    assert stated.median == median(all_stated)
    for daemon in fleet.daemons.values():
        if daemon.events("submitted", run="private-records"):
            spent = read_account(folder_of(daemon) / FILE)
            assert spent is not None
            assert 0 < shown[daemon.name].epsilon <= spent.epsilon(1e-5) * (1 + 1e-12)
            assert shown[daemon.name].delta == 1e-5
    check_reset(fleet, slow)
    result = replay(fleet.server, "private-records")
    assert result.exit_code != 0
    assert "secrets that only the devices have" in json.dumps(result.output) + repr(result.exception)


def check_reset(fleet: Fleet, daemon: Daemon) -> None:
    """The owner begins the account anew: the coordinator hears it when the device registers again."""
    daemon.kill()
    assert commands.main(["privacy", "reset", "--config", str(daemon.config), "--yes"]) == 0
    daemon.start()
    event = "privacy_account_reset"
    eventually(lambda: event in fleet.server.history(daemon.client_id), "the history has it")
