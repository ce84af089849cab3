"""The harness's coordinator and daemon as containers: the same settings, logs and signals, through podman."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.images.build import IMAGES
from tests.images.podman import SEALED, Podman
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import HERE, Process, Workspace, write_toml

USER = 10001
STATE = "/var/lib/impetus"
SETTINGS = "/etc/impetus"
TASKS = "/opt/tasks"


class Contained(Process):
    """A process in a container: volumes for settings, state and tasks, and podman's way to stop it."""

    podman: Podman
    image: str
    forks = False

    @property
    def container(self) -> str:
        """Its name; there is one at a time."""
        return f"{self.folder.name}-{self.name}"

    @property
    def mounted(self) -> Path:
        """The folder that becomes the settings' folder."""
        return self.folder / f"{self.name}-etc"

    def command(self) -> list[str]:
        """Podman in the foreground: its stdout and exit code are the container's."""
        state = _owned(self.folder / f"{self.name}-volume")
        self._put_settings()
        volumes = {state: STATE, self.mounted: f"{SETTINGS}:ro", HERE: f"{TASKS}:ro"}
        mounts = [f"--volume={path}:{mounted}" for path, mounted in volumes.items()]
        names = ["--rm", "--name", self.container, "--env", f"PYTHONPATH={TASKS}"]
        return [*self.podman.command, *SEALED, *names, *mounts, self.image]

    def environment(self) -> dict[str, str]:
        """Podman's own."""
        return self.podman.environment

    def stop(self, grace_s: int) -> int:
        """As a platform stops a pod: the image's signal, and SIGKILL after the grace. The container's exit code."""
        self.podman("stop", "--time", str(grace_s), self.container)
        return self.wait()

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another program in the container."""
        return self.podman.attempt("exec", self.container, *words)

    def clean_up(self) -> None:
        """End container and podman in any state."""
        self.podman.attempt("rm", "--force", "--time", "0", "--ignore", self.container)
        super().clean_up()

    def _put_settings(self) -> None:
        """The settings as the container sees them, with the files that they name."""
        _owned(self.mounted)
        shutil.copy(self.config, self.mounted / f"{self.name_in_image}.toml")
        _owned(self.mounted)

    @property
    def name_in_image(self) -> str:
        """server or client."""
        return next(name for name, image in IMAGES.items() if image == self.image)


class ContainedCoordinator(Contained, Coordinator):
    """A coordinator in the image for it."""

    image = IMAGES["server"]

    def __init__(self, podman: Podman, workspace: Workspace, settings: Mapping[str, Any] | None = None) -> None:
        self.podman = podman
        super().__init__(workspace, "server", {"state_dir": STATE, **(settings or {})})


class ContainedDaemon(Contained, Daemon):
    """A daemon in the image for it."""

    image = IMAGES["client"]

    def __init__(
        self, podman: Podman, workspace: Workspace, server: Coordinator, client_id: str, **settings: Any
    ) -> None:
        self.podman = podman
        super().__init__(workspace, server, client_id, state_dir=STATE, **settings)
        self.settings["task"]["options"] = {}
        write_toml(self.config, self.settings)


def _owned(folder: Path) -> Path:
    """A folder of the images' user, with all that is in it: what `fsGroup` does for a volume."""
    folder.mkdir(exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    return folder
