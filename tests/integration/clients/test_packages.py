"""Task packages with real processes: from the wheel to the update, the owner's decisions, hostile packages, kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fl_client.setup import commands
from fl_common.packages import unpack
from fl_common.signatures import SigningKey
from fl_ops.errors import OpsError
from tests.processes.federation import Daemon
from tests.processes.packaged import SECTIONS, WAVES, PackagedFleet
from tests.processes.process import Workspace, eventually, run_fl
from tests.processes.simulated import simulated_digests
from tests.processes.wheels import good_wheels, package, wheel


def owner(daemon: Daemon, *arguments: str) -> int:
    """Run `fl-client packages` on a device."""
    return commands.main(["packages", *arguments, "--config", str(daemon.config)])


def approve(daemon: Daemon, digest: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Approve a package that waits for it."""
    assert owner(daemon, "list") == 0
    assert owner(daemon, "show", digest[:20]) == 0
    assert "refused, approval" in capsys.readouterr().out
    assert owner(daemon, "approve", digest) == 0
    assert "may run" in capsys.readouterr().out


def until_second_is_taken_back(fleet: PackagedFleet, key: SigningKey, server: list[str]) -> None:
    """A version that waits for its owners leaves the one before at work, until an operator takes it back."""
    second = fleet.add(package([good_wheels()[0], wheel("ripples", {"ripples.py": "same = float"})], key))
    fleet.until(2, "released", waiting=3)
    eventually(lambda: all(device.detail for device in fleet.shown(2).devices), "their owners have not approved it")
    for device in fleet.shown(2).devices:
        refused = fleet[device.client_id].logged("package_refused", 2)
        assert (refused["rule"], second.package.digest in refused["reason"]) == ("approval", True)
        assert not fleet[device.client_id].events("package_stopped")  # version 1 goes on
    taken_back = run_fl("packages", "rollback", "waves", "--reason", "by hand", *server, folder=fleet.workspace.folder)
    assert taken_back.returncode == 0, taken_back.stderr
    fleet.until(2, "rolled_back", returned=3)


def test_a_package_runs_after_signature_and_approval(
    workspace: Workspace, modules: Path, key: SigningKey, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signed and added with `fl`, approved by each owner: the simulated bits, also after kills; then revoked."""
    fleet = PackagedFleet(workspace, modules, {"signers": [key.signer]})
    for name, data in good_wheels():
        (workspace.folder / name).write_bytes(data)
    task, dependency = (str(workspace.folder / name) for name, _ in good_wheels())
    made = run_fl(
        "packages", "sign", task, "--with", dependency, "--sign-key", str(workspace.folder / "key.pem"), "--json",
        folder=workspace.folder,
    )  # fmt: skip
    digest = json.loads(made.stdout)["digest"]
    server = ["--server", str(fleet.server.settings["admin_listen"]), "--insecure"]
    added = run_fl("packages", "add", "waves-1.0.package", *server, folder=workspace.folder)
    assert added.returncode == 0, added.stderr
    for daemon in fleet.daemons.values():
        refused = daemon.logged("package_refused", package="waves", rule="approval")
        assert key.signer in refused["reason"]
        assert digest in refused["reason"]
        approve(daemon, digest, capsys)
    fleet.until_running()
    pinned = {**SECTIONS, "task": {"name": WAVES, "package": digest}}
    _, slow = fleet.half_delivered("packaged", **pinned)
    slow.kill()
    fleet.server.kill()
    fleet.server.serve()
    slow.start()
    slow.hold.unlink()
    assert fleet.server.digests("packaged") == simulated_digests("packaged", **SECTIONS)
    fleet.server.create("beside", algorithm={"name": "fedavg"})
    fleet.server.completed("beside")
    listed = run_fl("packages", "list", *server, folder=workspace.folder)
    assert digest[:12] in listed.stdout
    until_second_is_taken_back(fleet, key, server)
    for daemon in fleet.daemons.values():
        assert owner(daemon, "revoke", digest) == 0
        daemon.logged("package_refused", package="waves", rule="revoked")
    fleet.until_running(0, 1)
    with pytest.raises(OpsError, match="package"):
        fleet.server.create("wrong", task={"name": WAVES, "package": "sha256:1"})


def version(key: SigningKey, text: str) -> bytes:
    """A package whose dependency does this for the loss."""
    return package([good_wheels()[0], wheel("ripples", {"ripples.py": f"def same(value):\n    {text}\n"})], key)


@pytest.mark.slow
def test_a_bad_version_is_halted_and_a_good_one_reaches_all(
    workspace: Workspace, modules: Path, key: SigningKey
) -> None:
    """Version 2 fails on its stage while a run goes on with version 1. Version 3 outlives a SIGKILL between its stages.

    The device that is off meanwhile gets version 3 when it is back.
    """
    fleet = PackagedFleet(workspace, modules, {"signers": [key.signer], "approval": False}, 5)
    versions = [version(key, text) for text in ("return value", "raise ArithmeticError('2')", "return value  # 3")]
    digests = [unpack(data)[0].digest for data in versions]
    fleet.add(versions[0])
    fleet.until(1, "released", installed=5)
    rounds = {"clients_per_round": 4, "min_clients": 4, "quorum": 2, "min_accepted": 2}
    run = fleet.server.create("r", task={"name": WAVES}, algorithm={"name": "fedavg"}, round=rounds,
                              stop={"rounds": 100_000})  # fmt: skip
    fleet.server.until(run, lambda status: status.rounds_done, "a round with version 1")
    assert fleet.add(versions[1], stages=[0.4, 1.0], advance_after_s=3600.0).state == "staged"
    halted = fleet.until(2, "rolled_back", returned=2)
    assert halted.reason.startswith("failed work rose by more than 10%: ")
    assert halted.package.work.failed >= 2
    stage = {device.client_id for device in fleet.shown(2).devices}
    for name, daemon in fleet.daemons.items():
        started = [event["digest"] for event in daemon.events("package_started")]
        assert started == ([digests[0], digests[1], digests[0]] if name in stage else [digests[0]])
    for name in stage:
        failed = fleet[name].logged("work_failed", run=run)
        assert "ArithmeticError: 2" in failed["message"]
    assert fleet.server.history("waves")[-1] == "package_rolled_back"
    off = fleet["edge-4"]
    off.kill()
    fleet.add(versions[2], stages=[0.4, 1.0], advance_after_s=0.1)
    fleet.server.kill()
    fleet.server.serve()
    assert fleet.shown(3).release.state == "staged"
    released = fleet.until(3, "released", installed=4, waiting=1)
    assert released.package.work.failed == 0
    off.start()
    fleet.until(3, "released", installed=5)
    assert off.events("package_started")[-1]["digest"] == digests[2]
    done = fleet.server.run(run).rounds_done
    fleet.server.until(run, lambda status: status.rounds_done > done, "the run goes on")
