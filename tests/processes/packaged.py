"""A coordinator and daemons that serve a task from a package, and what an operator does with packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blake3 import blake3

from protos.codec import digest_message
from protos.fl.v1 import admin_pb2
from tests.processes.federation import TASK, Coordinator, Daemon, Fleet
from tests.processes.process import Workspace, eventually, write_toml

WAVES = "waves:Waves"
SECTIONS: dict[str, Any] = {
    "task": {"name": WAVES}, "algorithm": {"name": "scaffold"}, "population": 3, "round": {"clients_per_round": 2}
}  # fmt: skip


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
