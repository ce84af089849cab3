"""Podman with a storage of its own: whatever a test makes is in one folder, and goes with it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

LONG_S = 1800.0
"""For a build on a machine that is busy with others."""
RUNTIMES = ("crun", "runc")


class CannotRun(Exception):
    """Containers cannot run on this machine, for this reason."""


class Podman:
    """Images and containers in `folder`; nothing outside it is read or changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = ""
        """The one that starts containers on this machine; the default's until `choose_runtime`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._settings = folder / "containers.conf"
        self._settings.write_text(_settings())

    @property
    def command(self) -> list[str]:
        """The arguments before every podman command."""
        places = {"root": "storage", "runroot": "run", "tmpdir": "libpod", "network-config-dir": "networks"}
        own = [word for option, name in places.items() for word in (f"--{option}", str(self.folder / name))]
        return ["podman", *own, *(["--runtime", self.runtime] if self.runtime else [])]

    @property
    def environment(self) -> dict[str, str]:
        """What podman is run with."""
        return {**os.environ, "CONTAINERS_CONF": str(self._settings), "TMPDIR": str(self.folder)}

    def __call__(self, *arguments: str, folder: Path | None = None) -> str:
        """Run a podman command in `folder`; its stdout. Fails with podman's message."""
        done = self.attempt(*arguments, folder=folder)
        assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def attempt(self, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """The same without a claim about how it ends."""
        return subprocess.run(
            [*self.command, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            cwd=folder,
            check=False,
        )

    def has(self, image: str) -> bool:
        """Whether an image of this name is in the storage."""
        return self.attempt("image", "exists", image).returncode == 0

    def choose_runtime(self, image: str) -> None:
        """Choose the first runtime that starts a container here. Raises CannotRun with the message of each."""
        errors = []
        for self.runtime in (each for each in RUNTIMES if shutil.which(each)):
            done = self.attempt("run", "--rm", "--network", "host", "--read-only", image, "true")
            if done.returncode == 0:
                return
            errors.append(f"{self.runtime}: {done.stderr.strip()}")
        raise CannotRun("; ".join(errors) or f"none of {', '.join(RUNTIMES)} is installed")

    def inside(self, image: str, *command: str, user: str = "10001:10001") -> subprocess.CompletedProcess[str]:
        """Run a program of an image in a read-only container."""
        entry, *arguments = command
        return self.attempt(*SEALED, "--rm", "--user", user, "--entrypoint", entry, image, *arguments)

    def clean_up(self) -> None:
        """Containers, images and the folder are gone, whatever state they were in."""
        if self.folder.exists():
            self.attempt("pod", "rm", "--all", "--force", "--time", "0")
            self.attempt("rm", "--all", "--force", "--time", "0")
            self.attempt("rmi", "--all", "--force")
            for mount in _mounts_below(self.folder):
                subprocess.run(["umount", "--lazy", mount], check=False)
            shutil.rmtree(self.folder)


SEALED: Sequence[str] = (
    "run",
    "--network=host",
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
)
"""Like a restricted pod: only mounted folders can be written, and no process can change its user."""


def _settings() -> str:
    """No limit above our own, which a machine that is a sandbox may refuse, and no log of events outside the folder."""
    hard = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    bounds = {name: _at_most(4096, resource.getrlimit(number)[1]) for name, number in hard.items()}
    limits = ", ".join(f'"{name}={bound}:{bound}"' for name, bound in bounds.items())
    return (
        f'[containers]\ndefault_ulimits = [{limits}]\n[engine]\nevents_logger = "none"\ncgroup_manager = "cgroupfs"\n'
    )


def _at_most(wanted: int, limit: int) -> int:
    return wanted if limit == resource.RLIM_INFINITY else min(wanted, limit)


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)
