"""Daemons that serve two shards of one task and another task, in real processes: kills, bits, states and accounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_client.privacy.files import AccountFiles
from fl_client.setup import commands
from tests.processes.federation import TASK, Daemon, Fleet
from tests.processes.process import HERE, Workspace, eventually
from tests.processes.simulated import simulated_digests

QUADRATIC = "quadratic_task:Quadratic"
SEEDS = {"east": 1, "west": 2}
"""Seeds of the partitions of the two shards."""
SCAFFOLD = {"algorithm": {"name": "scaffold"}, "population": 3, "round": {"clients_per_round": 3}, "personal": ["2.*"]}


class SeveralTasks(Fleet):
    """Three daemons, each with two shards of one task, and a task of another kind."""

    def daemon(self, index: int, size: int) -> Daemon:
        """See Fleet."""
        daemon = super().daemon(index, size)
        options = daemon.settings.pop("task")["options"]
        del daemon.settings["shard"]
        shards = {
            place: {"partition": {"method": "iid", "clients": size, "seed": seed}, "index": index}
            for place, seed in SEEDS.items()
        }
        tasks = [
            {"name": TASK, "options": options, "data": place, "labels": {"place": place}, "shard": shard}
            for place, shard in shards.items()
        ]
        daemon.configure(tasks=[*tasks, {"name": QUADRATIC, "shard": shards["east"]}])
        return daemon


def folder_of(daemon: Daemon) -> Path:
    """A daemon's state directory."""
    return Path(daemon.settings["state_dir"])


@pytest.fixture
def fleet(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> SeveralTasks:
    """A coordinator and three daemons."""
    monkeypatch.syspath_prepend(HERE)
    return SeveralTasks(workspace, 3)


def test_runs_use_the_data_of_their_labels_after_kills(fleet: SeveralTasks) -> None:
    """A run on each shard has the simulated bits, after kills of coordinator and daemon; the third task completes."""
    west = {"labels": {"place": "west"}, **SCAFFOLD}
    _, slow = fleet.half_delivered("west", **{**west, "round": {"clients_per_round": 2}, "population": 3})
    slow.kill()
    fleet.server.kill()
    fleet.server.serve()
    slow.start()
    slow.hold.unlink()
    sections = {**west, "round": {"clients_per_round": 2}}
    assert fleet.server.digests("west") == simulated_digests("west", partition=2, **sections)
    fleet.server.create("east", labels={"place": "east"}, **SCAFFOLD)
    assert fleet.server.digests("east") == simulated_digests("east", **SCAFFOLD)
    fleet.server.create("other", task={"name": QUADRATIC}, algorithm={"name": "fedavg"})
    fleet.server.completed("other")
    offers = fleet.server.client("edge-1").tasks
    assert [(offer.name, offer.data, offer.labels.get("place")) for offer in offers] == [
        (TASK, "east", "east"), (TASK, "west", "west"), (QUADRATIC, "", None),
    ]  # fmt: skip


def test_a_run_never_goes_on_with_the_state_of_other_data(fleet: SeveralTasks) -> None:
    """Labels change places while a run is paused: its state of the other data is lost, and the run restarts all."""
    fleet.server.create("moved", labels={"place": "west"}, **{**SCAFFOLD, "stop": {"rounds": 4}})
    fleet.server.until("moved", lambda run: run.rounds_done >= 1, "one round is done")
    with fleet.server.admin() as admin:
        admin.runs.pause_run("moved")
        daemon = fleet["edge-2"]
        daemon.kill()
        east, west, other = daemon.settings["tasks"]
        daemon.configure(tasks=[{**east, "labels": west["labels"]}, {**west, "labels": east["labels"]}, other])
        daemon.start()
        fleet.server.until_present("edge-2")
        admin.runs.resume_run("moved")
    fleet.server.completed("moved")
    assert "state_lost" in fleet.server.history("moved")
    assert daemon.events("data_changed", run="moved", before="west", now="east")


@pytest.mark.slow  # accounts of two data sets: fl_client/privacy; of one, networked: test_private_runs
def test_accounts_of_privacy_are_kept_by_data(fleet: SeveralTasks, capsys: pytest.CaptureFixture[str]) -> None:
    """A private run charges its own data on each device, durably, and no other; the owner sees both accounts."""
    privacy = {"unit": "record", "noise_multiplier": 1.5, "clip": 0.5, "delta": 1e-5}
    local = {"epochs": None, "steps": 4, "batch_size": 16}
    fleet.server.create("private", labels={"place": "west"}, privacy=privacy, local=local, stop={"rounds": 1})
    fleet.server.completed("private")
    for daemon in fleet.daemons.values():
        sent = len(daemon.events("submitted", run="private"))
        accounts = {name: AccountFiles.of(folder_of(daemon), name).read() for name in ("", "east", "west")}
        spent = {name: account.charges for name, account in accounts.items() if account is not None}
        assert spent == {"": 0, "east": 0, "west": sent}
    charged = next(daemon for daemon in fleet.daemons.values() if daemon.events("submitted", run="private"))
    assert commands.main(["privacy", "--config", str(charged.config), "--data", "west"]) == 0
    assert "4 steps with noise_multiplier 1.5" in capsys.readouterr().out
    assert commands.main(["privacy", "--config", str(charged.config), "--data", "moon"]) == 2
    assert "--data: expected east or west" in capsys.readouterr().err
    charged.kill()
    folder = AccountFiles.of(folder_of(charged), "west").folder
    (folder / "privacy.json").unlink()
    charged.start()
    fleet.server.until_present(charged.client_id)
    fleet.server.create("again", labels={"place": "west"}, privacy=privacy, local=local, round={"clients_per_round": 3})
    eventually(lambda: charged.events("privacy_account_lost"), "the lost account is noticed")
