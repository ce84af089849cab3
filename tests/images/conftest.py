"""The images, built once for each session and removed with it; a skip with the reason where that is impossible."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from tests.images.base import base_name, make
from tests.images.build import IMAGES, build
from tests.images.podman import CannotRun, Podman

TOOLS = ("podman", "debootstrap", "chroot", "tar")
KEPT = "IMAGES_FOLDER"
"""Environment variable: a persistent folder; its images are not built again."""


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Podman with the base and both images in its storage, one for all workers."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian's packages have them)")
    if os.geteuid() != 0:
        pytest.skip("debootstrap, which makes the images' base, needs root")
    kept = os.environ.get(KEPT)
    folder = Path(kept) if kept else _session(tmp_path_factory) / "images"
    users = folder.with_name(f"{folder.name}-users")
    mine = users / str(os.getpid())
    podman = Podman(folder)
    try:
        with _alone(folder):
            users.mkdir(exist_ok=True)
            mine.touch()
            _prepare(podman)
        yield podman
    finally:
        with _alone(folder):
            mine.unlink(missing_ok=True)
            # The last worker cleans up. One that comes later still builds again: slow, and right.
            if not kept and not any(users.iterdir()):
                podman.clean_up()


def _prepare(podman: Podman) -> None:
    """Base and images, unless they are there."""
    try:
        if not podman.has(base_name()):
            make(podman)
        podman.choose_runtime(base_name())
    except CannotRun as reason:
        pytest.skip(f"no containers on this machine: {reason}")
    for image in IMAGES.values():
        if not podman.has(image):
            build(podman, image)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other worker is within the block."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield


def _session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all workers of pytest-xdist have in common; without them, our own."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
