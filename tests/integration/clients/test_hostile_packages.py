"""What packages do to a device, with real processes: code of bad intent, and packages that nobody should accept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from blake3 import blake3

from fl_client.packages import landlock
from fl_common.packages import unpack
from fl_common.signatures import SigningKey, make_key
from fl_ops.errors import OpsError
from fl_server.rounds.releases import Kind, Rules
from fl_server.store.database.ledger_clients import ReleaseRecord
from fl_server.store.database.store import LEDGER, open_sqlite
from fl_server.store.records import HistoryRecord
from tests.processes.certificates import Pki, section
from tests.processes.federation import TASK, Coordinator, Daemon, SecureCoordinator
from tests.processes.packaged import WAVES, PackagedFleet, add
from tests.processes.process import Workspace, eventually, write_toml
from tests.processes.wheels import good_wheels, package, sources, wheel


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
