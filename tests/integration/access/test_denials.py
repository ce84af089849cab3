"""A restored backup undoes no revocation and no ban: k8s/tools/restore.sh with a real coordinator."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import grpc
import pytest

from fl_ops.admin.settings import Certificates
from protos.fl.v1 import admin_pb2, coordinator_pb2, coordinator_pb2_grpc
from tests.marks import slow_except
from tests.processes.certificates import Pki, credentials
from tests.processes.federation import SecureCoordinator
from tests.processes.process import ROOT, TIMEOUT_S, Workspace

RESTORE = ROOT / "k8s/tools/restore.sh"


def refusal(server: SecureCoordinator, device: Certificates, name: str) -> str:
    """Why the coordinator refuses a device; its supported versions if it accepts the device."""
    with grpc.secure_channel(server.address, credentials(device)) as channel:
        request = coordinator_pb2.RegisterRequest(client_id=name)
        with pytest.raises(grpc.RpcError) as refused:
            coordinator_pb2_grpc.CoordinatorStub(channel).Register(request, timeout=TIMEOUT_S)
        return str(refused.value.details())


@pytest.fixture
def restored(workspace: Workspace) -> Restored:
    """A coordinator with two devices and a backup, after which one is revoked and the other banned."""
    return Restored(workspace)


class Restored:
    """The coordinator, its backup, and the script with a stub of kubectl."""

    def __init__(self, workspace: Workspace) -> None:
        self.folder = workspace.folder
        self.pki = Pki(self.folder / "pki")
        self.server = SecureCoordinator(workspace, self.pki).serve()
        self.state = Path(self.server.settings["state_dir"])
        self.devices = {name: self.pki.issue("client", name) for name in ("stolen", "hostile")}
        self.stop()
        subprocess.run(["tar", "-C", self.state, "-cf", self.folder / "state.tar", "."], check=True)
        self.server.serve()
        with self.server.admin() as admin:
            admin.access.revoke_certificates("stolen", name="stolen")
            admin.clients.ban_client("hostile", "it lies")
        shutil.copy(self.state / "denials.json", self.folder / "kept.json")
        self.stop()

    def stop(self) -> None:
        """End the coordinator."""
        self.server.signal(signal.SIGTERM)
        assert self.server.wait() == 0

    def restore(self, denials: str) -> subprocess.CompletedProcess[str]:
        """Run the script."""
        tools = self.folder / "bin"
        tools.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests/k8s/kubectl_stub.sh", tools / "kubectl")
        (tools / "kubectl").chmod(0o755)
        environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "STATE": str(self.state)}
        command = ["sh", str(RESTORE), "state.tar", denials]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def accepted(self) -> list[str]:
        """The devices that the coordinator accepts."""
        found = {name: refusal(self.server, files, name) for name, files in self.devices.items()}
        return [name for name, text in found.items() if "no protocol version in common" in text]


def audited(server: SecureCoordinator) -> list[str]:
    """The subjects of the rows of restored denials."""
    with server.admin() as admin:
        rows = [row for page in admin.history.list_audit(admin_pb2.ListAuditRequest()) for row in page.entries]
    return sorted(row.subject for row in rows if row.method == "denial_restored")


@pytest.mark.parametrize("volume", slow_except(["kept", "lost"], "lost"))
def test_a_restore_keeps_revocations_and_bans_of_after_the_backup(restored: Restored, volume: str) -> None:
    """From the list that was kept beside the backup, whether the volume has its own or not; the audit log has rows."""
    if volume == "lost":
        (restored.state / "denials.json").unlink()
    done = restored.restore("kept.json")
    assert done.returncode == 0, done.stderr
    restored.server.serve()
    assert restored.accepted() == []
    assert "name stolen" in audited(restored.server)
    assert "ban hostile" in audited(restored.server)
    assert sorted(path.name for path in restored.state.glob("denials*")) == ["denials.json"]
    before = audited(restored.server)
    restored.stop()
    restored.server.serve()
    assert audited(restored.server) == before


def test_a_restore_without_the_list_changes_nothing(restored: Restored) -> None:
    """The script refuses and names the flag; with the flag the revoked device is back."""
    refused = restored.restore("none.json")
    assert refused.returncode == 2
    assert "--without-denials" in refused.stderr
    restored.server.serve()
    assert restored.accepted() == []
    restored.stop()
    assert restored.restore("--without-denials").returncode == 0
    restored.server.serve()
    assert restored.accepted() == ["stolen", "hostile"]


@pytest.mark.slow  # fl_server/enrollment and fl_server/clients have this without processes
def test_a_lifted_ban_does_not_come_back_at_a_start(restored: Restored) -> None:
    """The list is written before a ban ends, so no start bans the device again."""
    restored.server.serve()
    with restored.server.admin() as admin:
        admin.call(admin_pb2.UnbanClientRequest(client_id="hostile"), admin_pb2.UnbanClientResponse)
    restored.stop()
    restored.server.serve()
    assert restored.accepted() == ["hostile"]
