"""Released models with real processes: staged, checked, announced, evaluated, rolled back; killed ones go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

from fl_common.signatures import SigningKey, make_key
from protos.fl.v1 import admin_pb2
from tests.processes.federation import TASK, Coordinator, Daemon
from tests.processes.process import Workspace, eventually, run_fl
from tests.processes.tiny_task import Tiny

MODEL = "Tiny"
KEPT = 4
HOOK = """
import json, os, sys
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([os.environ["FL_MODEL"], int(os.environ["FL_VERSION"]), os.environ["FL_MODEL_PATH"]]) + "\\n")
sys.exit(int(open(sys.argv[2]).read()) if os.path.exists(sys.argv[2]) else 0)
"""


class Site(Daemon):
    """A daemon that takes releases, and the owner's program."""

    def __init__(self, workspace: Workspace, server: Coordinator, index: int, size: int, **settings: Any) -> None:
        name = f"edge-{index}"
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        super().__init__(workspace, server, name, shard=shard, options={"kept": KEPT, "model": "broad"})
        self.called, self.fails = self.folder / f"{name}.called", self.folder / f"{name}.fails"
        program = self.folder / "hook.py"
        program.write_text(HOOK)
        self.announcement = self.folder / f"{name}.json"
        hook = [sys.executable, "-S", str(program), str(self.called), str(self.fails)]
        self.configure(releases={"announce": str(self.announcement), "hook": hook, **settings})

    @property
    def models(self) -> Path:
        """The folder of the released model."""
        return Path(self.settings["state_dir"]) / "releases" / MODEL

    def in_use(self) -> tuple[int, str]:
        """The version in use, and the digest of its weights."""
        current = self.models / "current"
        if not current.exists():
            return 0, ""
        data = (current / "model.safetensors").read_bytes()
        return int(current.readlink().name), blake3(data).hexdigest()

    def calls(self) -> list[int]:
        """The versions for which the owner's program was called."""
        lines = self.called.read_text().splitlines() if self.called.exists() else []
        return [json.loads(line)[1] for line in lines]


class Sites:
    """A coordinator, a run of two rounds, and daemons that take releases by one key."""

    def __init__(self, workspace: Workspace, size: int, **server: Any) -> None:
        self.folder, self.workspace = workspace.folder, workspace
        self.key: SigningKey = make_key(self.folder / "release.pem")
        limits = {"reattach_grace_s": 2.0, "chunk_bytes": 1 << 16}
        self.server = Coordinator(workspace, settings={"limits": limits, **server}).serve()
        self.sites = [Site(workspace, self.server, index, size, signers=[self.key.signer]) for index in range(size)]
        for site in self.sites:
            site.start()
        self.server.until_present(*(site.client_id for site in self.sites))
        self.run = self.server.create("r", task={"name": TASK, "options": {"model": "broad"}}, stop={"rounds": 2})
        self.server.completed(self.run)

    def fl(self, *arguments: str) -> Any:
        """Call `fl release`; its JSON."""
        address = str(self.server.settings["admin_listen"])
        result = run_fl("release", *arguments, "--json", "--insecure", "--server", address, folder=self.folder)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def release(self, *arguments: str, round_: str = "best") -> Any:
        """Release the run's model."""
        return self.fl(self.run, "--round", round_, "--sign-key", str(self.folder / "release.pem"), *arguments)

    def shown(self, version: int = 0) -> admin_pb2.GetReleaseResponse:
        """A release with its devices."""
        with self.server.admin() as admin:
            return admin.models.get_release(MODEL, version)

    def until(self, version: int, **devices: int) -> admin_pb2.GetReleaseResponse:
        """Wait until so many devices are in each of these states."""

        def probe() -> admin_pb2.GetReleaseResponse | None:
            shown = self.shown(version)
            return shown if dict(shown.release.devices) == devices else None

        return eventually(probe, f"version {version} has {devices}, not {self.shown(version).release}")


@pytest.mark.slow
def test_a_graph_in_onnx_reaches_a_device(workspace: Workspace) -> None:
    """Beside the weights, which the device evaluates: the graph's outputs for an example are those of the weights."""
    reference = pytest.importorskip("onnx.reference")
    sites = Sites(workspace, 3)
    config = sites.folder / "run.toml"
    config.write_text(
        'name = "r"\n[task]\nname = "tests.processes.tiny_task:Tiny"\noptions = {model = "broad"}\n'
        '[algorithm]\nname = "fedavg"\n'
    )
    sites.release("--format", "onnx", "--config", str(config))
    sites.until(1, evaluated=3)
    folder = sites.sites[0].models / "current"
    graph = reference.ReferenceEvaluator(str(folder / "model.onnx"))
    task = Tiny(model="broad")
    model = task.model().eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    inputs = task.eval_data().inputs[:1]
    (computed,) = graph.run(None, {graph.input_names[0]: inputs.numpy()})
    torch.testing.assert_close(torch.as_tensor(computed), model(inputs).detach())


def test_a_release_is_checked_announced_and_taken_back(workspace: Workspace) -> None:
    """Two of three daemons take version 1; the third trusts another key. Version 2 goes back when a program fails."""
    sites = Sites(workspace, 3)
    stranger = sites.sites[2]
    stranger.terminate()
    stranger.configure(releases={**stranger.settings["releases"], "signers": [make_key(sites.folder / "x").signer]})
    stranger.start()
    created = sites.release("--most-failed", "50%", "--metric", "accuracy")
    shown = sites.until(1, evaluated=2, refused=1)
    assert "expected a signature of blake3:" in next(each.detail for each in shown.devices if each.state == "refused")
    assert {site.in_use() for site in sites.sites[:2]} == {(1, created["digest"])}
    assert [site.in_use()[0] for site in sites.sites] == [1, 1, 0]
    assert all(0 <= each.metrics["accuracy"] <= 1 for each in shown.devices if each.state == "evaluated")
    announced = json.loads(sites.sites[0].announcement.read_text())[MODEL]
    assert (announced["version"], Path(announced["path"]).name) == (1, "00000001")
    sites.sites[0].fails.write_text("3")
    sites.release("--most-failed", "50%", round_="0")
    sites.until(2, failed=1, returned=1, refused=1)
    assert sites.shown(2).release.state == "rolled_back"
    eventually(lambda: [site.in_use()[0] for site in sites.sites] == [1, 1, 0], "all use version 1 again")
    assert sites.sites[0].calls() == [1, 2, 1]
    assert {site.in_use() for site in sites.sites[:2]} == {(1, created["digest"])}
    details = {each.client_id: each.detail for each in sites.shown(2).devices}
    assert details["edge-0"] == "the owner's program ended with exit code 3"
    sites.sites[0].fails.unlink()
    sites.fl("rollback", MODEL, "--reason", "the run was wrong")
    eventually(lambda: not any(site.in_use()[0] for site in sites.sites), "no version is in use")


class Mortal(Site):
    """A daemon that SIGKILL ends before its nth change of a file among the released models."""

    at = 1

    def environment(self) -> dict[str, str]:
        """With the number of the change."""
        return {**super().environment(), "KILL_AT": str(self.at), "KILL_IN": "/releases/"}

    def dies_at(self, at: int | None) -> None:
        """Die so at the next start; None: live."""
        self._module = "fl_client" if at is None else "tests.processes.killed_daemon"
        self.at = at or 0


@pytest.mark.slow
def test_a_device_killed_at_any_write_installs_the_same_bytes(workspace: Workspace) -> None:
    """SIGKILL at each change of a file in turn: the version in use is always whole, and in the end the new one."""
    sites = Sites(workspace, 3)
    first = sites.release(round_="0")
    sites.until(1, evaluated=3)
    alive = sites.sites[0]
    mortal = Mortal(workspace, sites.server, 0, 3, signers=[sites.key.signer])
    alive.terminate()
    second, at = sites.release(), 0
    digests = {1: first["digest"], 2: second["digest"]}
    while True:
        at += 1
        mortal.dies_at(at)
        mortal.start()
        if eventually(lambda: mortal.exit_code is not None or installed(sites, 2), f"killed or done at {at}") != "done":
            mortal.wait()
            version, digest = mortal.in_use()
            assert digests[version] == digest
            continue
        break
    assert at > 6  # a killed process leaves a part of the work done
    assert mortal.in_use() == (2, second["digest"])
    sites.until(2, evaluated=3)
    assert mortal.calls()[-1] == 2


def installed(sites: Sites, version: int) -> str:
    """The word "done" once all devices of a version have evaluated it."""
    release = sites.shown(version).release
    return "done" if set(release.devices) == {"evaluated"} else ""


def trust_another_key(sites: Sites, number: int) -> None:
    """Start a device again with another signer in its settings."""
    site = sites.sites[number]
    site.terminate()
    site.configure(releases={**site.settings["releases"], "signers": [make_key(sites.folder / "x").signer]})
    site.start()


@pytest.mark.slow
def test_twenty_devices_with_every_fault(workspace: Workspace) -> None:
    """Of 20 devices one trusts another key, one is off and comes back, one is killed while it writes.

    The coordinator is killed in between. Stages of 30% and 100%: at the end 19 have the same bytes. Then a version that
    measures worse is taken back by the rule, everywhere.
    """
    sites = Sites(workspace, 20)
    stranger, absent, torn = sites.sites[3], sites.sites[7], sites.sites[11]
    trust_another_key(sites, 3)
    absent.terminate()
    torn.terminate()
    mortal = Mortal(workspace, sites.server, 11, 20, signers=[sites.key.signer])
    mortal.dies_at(5)
    mortal.start()
    sites.server.until_present("edge-3", "edge-11")
    losses = [summary.metrics["loss"] for summary in sites.server.rounds(sites.run)]
    better, worse_round = (str(losses.index(end)) for end in (min(losses), max(losses)))
    rule = ("--metric", "loss", "--most-drop")
    created = sites.release("--stage", "30%", "--most-failed", "20%", *rule, "0.5", round_=better)
    assert sum(created["devices"].values()) == 6
    in_stage = {device.client_id for device in sites.shown().devices}
    absent_now = {"edge-7", "edge-11", "edge-3"}
    eventually(lambda: evaluated(sites) >= in_stage - absent_now, "the stage has it")
    assert all(site.in_use()[0] == 0 for site in sites.sites if site.client_id not in in_stage)
    sites.server.kill()
    sites.server.serve()
    sites.fl("advance", MODEL)
    others = {site.client_id for site in sites.sites} - absent_now
    eventually(lambda: evaluated(sites) >= others, "all others have it")
    eventually(lambda: mortal.exit_code is not None, "it was killed while it wrote")
    assert mortal.in_use() == (0, "")
    mortal.dies_at(None)
    mortal.start()
    absent.start()
    sites.until(1, evaluated=19, refused=1)
    have = [site for site in sites.sites if site is not stranger]
    assert {site.in_use() for site in have} == {(1, created["digest"])}
    assert stranger.in_use()[0] == 0
    worse = sites.release(*rule, "0", "--most-failed", "10%", round_=worse_round)
    assert worse["version"] == 2
    eventually(lambda: sites.shown(2).release.state == "rolled_back", "the rule takes it back")
    eventually(lambda: {site.in_use() for site in have} == {(1, created["digest"])}, "all have the same bytes again")
    assert sites.shown(2).release.fell > 0
    events = sites.server.history(sites.run)
    assert [events.count(f"release_{name}") for name in ("created", "advanced", "rolled_back")] == [2, 3, 1]


def evaluated(sites: Sites) -> set[str]:
    """The devices that have evaluated the newest version."""
    return {device.client_id for device in sites.shown().devices if device.state == "evaluated"}
