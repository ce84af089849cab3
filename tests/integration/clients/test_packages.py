"""Task packages with real processes: from the wheel to the update, the owner's decisions, hostile packages, kills."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from fl_client.packages import landlock
from fl_client.setup import commands
from fl_common.packages import unpack
from fl_common.signatures import SigningKey, make_key
from fl_ops.errors import OpsError
from fl_server.rounds.releases import Kind, Rules
from fl_server.store.database.ledger_clients import ReleaseRecord
from fl_server.store.database.store import LEDGER, open_sqlite
from fl_server.store.records import HistoryRecord
from protos.codec import digest_message
from protos.fl.v1 import admin_pb2
from tests.processes.certificates import Pki, section
from tests.processes.federation import TASK, Coordinator, Daemon, Fleet, SecureCoordinator
from tests.processes.process import HERE, Workspace, eventually, run_fl, write_toml
from tests.processes.simulated import simulated_digests
from tests.processes.wheels import good_wheels, package, sources, wheel

WAVES = "waves:Waves"
SECTIONS: dict[str, Any] = {
    "task": {"name": WAVES}, "algorithm": {"name": "scaffold"}, "population": 3, "round": {"clients_per_round": 2}
}  # fmt: skip


@pytest.fixture
def modules(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package's modules, as the coordinator's operator installs them there."""
    folder = workspace.folder / "installed"
    folder.mkdir()
    for name, text in sources().items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def key(workspace: Workspace) -> SigningKey:
    """The key that signs packages."""
    return make_key(workspace.folder / "key.pem")


class PackagedFleet(Fleet):
    """A coordinator with the task installed, and daemons that serve it from a package, and another task."""

    def __init__(self, workspace: Workspace, modules: Path, policy: dict[str, Any], size: int = 3) -> None:
        self.workspace = workspace
        self.policy = workspace.folder / "policy.toml"
        write_toml(self.policy, {"packages": policy, "work": {"min_clients": 1, "min_examples": 1}})
        self.server = Coordinator(workspace, settings={"tasks": [WAVES, TASK]}, path=[modules]).serve()
        self.daemons = {f"edge-{index}": self.daemon(index, size).start() for index in range(size)}
        self.until_all_present()

    def daemon(self, index: int, size: int) -> Daemon:
        """See Fleet."""
        daemon = super().daemon(index, size)
        task, shard = daemon.settings.pop("task"), daemon.settings.pop("shard")
        packaged = {"name": WAVES, "package": "waves", "options": task["options"], "shard": shard, "data": "waves"}
        daemon.configure(tasks=[{**task, "shard": shard}, packaged], policy=str(self.policy))
        return daemon

    def add(self, data: bytes, **rules: Any) -> admin_pb2.ReleaseStatus:
        """See below."""
        return add(self.server, data, self.workspace.folder, **rules)

    def shown(self, version: int = 0) -> admin_pb2.GetReleaseResponse:
        """A version of the package with its devices. 0: the newest."""
        with self.server.admin() as admin:
            return admin.models.get_release("waves", version, "package")

    def until_running(self, count: int = 3, version: int = 0) -> None:
        """Wait until so many devices have registered the task of the package."""

        def running() -> bool:
            return self.shown(version).release.devices["installed"] == count

        eventually(running, f"the package runs on {count} devices")

    def until(self, version: int, state: str, **devices: int) -> admin_pb2.ReleaseStatus:
        """Wait until a version is in this state, with so many devices in each of these."""

        def probe() -> admin_pb2.ReleaseStatus | None:
            release = self.shown(version).release
            return release if (release.state, dict(release.devices)) == (state, devices) else None

        return eventually(probe, f"version {version} is {state} with {devices}, not {self.shown(version).release}")


def add(server: Coordinator, data: bytes, folder: Path, **rules: Any) -> admin_pb2.ReleaseStatus:
    """Release a package as `fl packages add` does."""
    path = folder / "added.package"
    path.write_bytes(data)
    with path.open("rb") as file, server.admin() as admin:
        admin.models.upload_model(file, release=True)
        rules = {"stages": [1.0], "most_failed": 0.1, "most_rise": 0.1, **rules}
        request = admin_pb2.AddPackageRequest(
            digest=digest_message(blake3(data).digest()), rules=admin_pb2.ReleaseRules(**rules)
        )
        return admin.call(request, admin_pb2.AddPackageResponse).release


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
    second = fleet.add(package([good_wheels()[0], wheel("ripples", {"ripples.py": "same = float"})], key))
    fleet.until(2, "released", waiting=3)
    eventually(lambda: all(device.detail for device in fleet.shown(2).devices), "their owners have not approved it")
    for device in fleet.shown(2).devices:
        refused = fleet[device.client_id].logged("package_refused", 2)
        assert (refused["rule"], second.package.digest in refused["reason"]) == ("approval", True)
        assert not fleet[device.client_id].events("package_stopped")  # version 1 goes on
    taken_back = run_fl("packages", "rollback", "waves", "--reason", "by hand", *server, folder=workspace.folder)
    assert taken_back.returncode == 0, taken_back.stderr
    fleet.until(2, "rolled_back", returned=3)
    for daemon in fleet.daemons.values():
        assert owner(daemon, "revoke", digest) == 0
        daemon.logged("package_refused", package="waves", rule="revoked")
    fleet.until_running(0, 1)
    with pytest.raises(OpsError, match="package"):
        fleet.server.create("wrong", task={"name": WAVES, "package": "sha256:1"})


@pytest.mark.slow
def test_what_a_package_does_to_its_process_ends_there(workspace: Workspace, modules: Path, key: SigningKey) -> None:
    """Its loss eats memory, forks, calls the network, exits, lies, hangs: the device goes on."""
    fleet = PackagedFleet(workspace, modules, {"signers": [key.signer], "approval": False})
    deeds = {
        "memory": "allocate",
        "fork": "not permitted",
        "network": "not permitted",
        "exit": "ended with code 3",
        "lie": "too long",
        "hang": "limits.max_seconds",
    }
    daemon = fleet["edge-0"]
    for other in ("edge-1", "edge-2"):
        fleet[other].kill()
    pid = daemon.pid
    fleet.add(package(good_wheels(), key))
    for deed, words in deeds.items():
        daemon.kill()
        task, packaged = daemon.settings["tasks"]
        daemon.configure(
            tasks=[task, {**packaged, "options": {**packaged["options"], "deed": deed}}],
            packages={"memory_mib": 512},
            limits={"max_seconds": 5.0 if deed == "hang" else 600.0},
        )
        daemon.start()
        pid = daemon.pid
        daemon.logged("package_started", package="waves")
        alone = {"clients_per_round": 1, "min_clients": 1, "quorum": 1, "min_accepted": 1}
        eventually(
            lambda: fleet.server.client("edge-0").tasks[-1:] and len(fleet.server.client("edge-0").tasks) == 2, "two"
        )
        run = fleet.server.create(f"deed-{deed}", task={"name": WAVES}, algorithm={"name": "fedavg"}, round=alone)
        failed = daemon.logged("work_failed", run=run)
        assert words in failed["message"], failed
        with fleet.server.admin() as admin:
            admin.runs.stop_run(run, "its test is over")
        again = fleet.server.create(f"after-{deed}", algorithm={"name": "fedavg"}, round=alone, stop={"rounds": 1})
        fleet.server.completed(again)
        assert (daemon.pid, daemon.exit_code) == (pid, None)


@pytest.mark.slow
@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
def test_a_package_reads_neither_key_nor_state_of_its_daemon(
    workspace: Workspace, modules: Path, key: SigningKey
) -> None:
    """It finds none of the files, nor by way of the daemon's process; the daemon works on, and renews its session."""
    pki = Pki(workspace.folder / "pki")
    server = SecureCoordinator(workspace, pki, {"tasks": [WAVES, TASK]}, path=[modules]).serve()
    policy = workspace.folder / "policy.toml"
    work = {"min_clients": 1, "min_examples": 1}
    write_toml(policy, {"packages": {"signers": [key.signer], "approval": False}, "work": work})
    files = pki.issue("client", "edge-0")
    daemon = Daemon(workspace, server, "edge-0", insecure=False, tls=section(files), policy=str(policy))
    state = Path(daemon.settings["state_dir"])
    del daemon.settings["task"]
    secrets = [
        files.key,
        *(state / name for name in ("identity.json", "lock", "audit.jsonl", "packages/waves.current")),
    ]
    options = {"hold": str(daemon.hold), "deed": " ".join(["read", *map(str, secrets)])}
    shard = {"partition": {"method": "iid", "clients": 1, "seed": 1}, "index": 0}
    daemon.configure(tasks=[{"name": WAVES, "package": "waves", "options": options, "shard": shard, "data": "waves"}])
    daemon.start()
    server.until_present("edge-0")
    add(server, package(good_wheels(), key), workspace.folder)
    daemon.logged("package_started", package="waves")
    assert all(path.is_file() for path in secrets)
    alone = {"clients_per_round": 1, "min_clients": 1, "quorum": 1, "min_accepted": 1}
    server.create("reads", task={"name": WAVES}, algorithm={"name": "fedavg"}, round=alone)
    assert "PermissionError: read: []" in daemon.logged("work_failed", run="reads")["message"]
    assert daemon.exit_code is None


def hostile_packages(key: SigningKey, other: SigningKey) -> Iterator[tuple[str, bytes, str]]:
    """Name, file and rule of packages that a coordinator of bad intent offers."""
    module = {"waves.py": sources()["waves.py"]}
    wheels = {
        "parent": wheel("parent", {**module, "../../outside.py": ""}),
        "absolute": wheel("absolute", {**module, "/tmp/outside.py": ""}),  # noqa: S108 - it is refused
        "link": wheel("link", {**module, "link": "/etc/passwd"}, links=["link"]),
        "pth": wheel("pth", {**module, "evil.pth": "import os"}),
        "scripts": wheel("scripts", {**module, "scripts-1.0.data/scripts/python": "#!python"}),
        "record": wheel("record", {**module, "more.py": ""}, record={"more.py": "sha256=" + "A" * 43}),
    }
    rules = {"link": "paths", "parent": "paths", "absolute": "paths", "pth": "start", "scripts": "data"}
    for name, made in wheels.items():
        yield name, package([made], key), rules.get(name, "record")
    yield "foreign", package([wheel("foreign", module)], other), "signers"
    task, first, second = wheel("swapped", module), *(wheel("ripples", {"ripples.py": text}) for text in ("1", "2"))
    swapped, whole = package([task, second], key), unpack(package([task, first], key))[0]
    head = json.loads(swapped.partition(b"\n")[0]) | {"signature": whole.signature}
    yield "swapped", json.dumps(head).encode() + b"\n" + swapped.partition(b"\n")[2], "signature"


def plant(state: Path, packages: Sequence[bytes]) -> None:
    """Write packages into the state of a coordinator that has ended, as if it had accepted them."""
    (state / "packages").mkdir(exist_ok=True)
    with closing(open_sqlite(state / LEDGER)) as store:
        for data in packages:
            digest, manifest = blake3(data), unpack(data)[0]
            (state / "packages" / f"{digest.hexdigest()}.bundle").write_bytes(data)
            record = ReleaseRecord(
                Kind.PACKAGE, manifest.name, 1, "", "", manifest.model_dump_json().encode(), b"", manifest.signer,
                digest.digest(), 1.0, asdict(Rules()), share=1.0,
            )  # fmt: skip
            store.add_release(record, HistoryRecord(1.0, "test", "package_added", manifest.name))


def test_hostile_packages_are_refused_by_a_daemon(workspace: Workspace, modules: Path, key: SigningKey) -> None:
    """A coordinator offers packages that its own checks would refuse. The daemon names rule, signer and digest."""
    hostile = list(hostile_packages(key, make_key(workspace.folder / "other.pem")))
    server = Coordinator(workspace, settings={"tasks": [WAVES, TASK]}, path=[modules]).serve()
    server.kill()
    plant(Path(server.settings["state_dir"]), [data for _, data, _ in hostile])
    server.serve()
    policy = workspace.folder / "policy.toml"
    write_toml(policy, {"packages": {"signers": [key.signer], "approval": False}})
    daemon = Daemon(workspace, server, "edge-0")
    del daemon.settings["task"]
    evil = [
        {"name": WAVES, "package": name, "data": name, "shard": {"folder": f"/nowhere/{name}"}}
        for name, _, _ in hostile
    ]
    daemon.configure(tasks=evil, policy=str(policy))
    daemon.start()
    for name, data, rule in hostile:
        refused = daemon.logged("package_refused", package=name)
        manifest = unpack(data)[0]
        assert refused["rule"] == rule
        assert manifest.digest in refused["reason"]
        assert manifest.signer in refused["reason"]
    state = Path(daemon.settings["state_dir"]) / "packages"
    assert [path for path in state.iterdir() if path.is_dir()] == []
    assert not daemon.events("package_started")
    server.until_present("edge-0")  # it waits for packages, without any task
    assert list(server.client("edge-0").tasks) == []
    assert daemon.exit_code is None


def test_a_coordinator_refuses_what_devices_would(workspace: Workspace, modules: Path, key: SigningKey) -> None:
    """An operator hears of a hostile wheel, a wrong signature or a changed byte at once."""
    fleet = PackagedFleet(workspace, modules, {"signers": [key.signer], "approval": False})
    good = package(good_wheels(), key)
    changed = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(OpsError, match="rule digest"):
        fleet.add(changed)
    with pytest.raises(OpsError, match="rule start"):
        fleet.add(package([wheel("evil", {"evil.pth": ""})], key))
    assert fleet.add(good).state == "released"
    fleet.until_running()


@pytest.mark.slow
def test_a_bad_version_is_halted_and_a_good_one_reaches_all(
    workspace: Workspace, modules: Path, key: SigningKey
) -> None:
    """Version 2 fails on its stage while a run goes on with version 1. Version 3 outlives a SIGKILL between its stages.

    The device that is off meanwhile gets version 3 when it is back.
    """
    fleet = PackagedFleet(workspace, modules, {"signers": [key.signer], "approval": False}, 5)
    texts = ["return value", "raise ArithmeticError('ripples 2')", "return value  # 3"]
    versions = [
        package([good_wheels()[0], wheel("ripples", {"ripples.py": f"def same(value):\n    {text}\n"})], key)
        for text in texts
    ]
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
        assert "ArithmeticError: ripples 2" in failed["message"]
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
