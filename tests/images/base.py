"""A stand-in for the images' base, made where no registry of images can be reached.

Debian's minimal system of the base's release with Debian's Python of the base's minor version, and pip and setuptools
where the real base has them. It is not the real base: the patch version of Python is Debian's. The Containerfiles are
built on it unchanged, because it has the base's name.

`python -m tests.images.base FOLDER` makes it in a storage that stays, and prints how to build on it by hand.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.images.containerfile import Containerfile
from tests.images.podman import LONG_S, CannotRun, Podman

IMAGES = Path(__file__).parents[2] / "k8s" / "images"
ENVIRONMENT = ("PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")
SYSTEM = ("ca-certificates", "netbase", "tzdata", "python3.{minor}")
BUILDING = ("python3.{minor}-venv", "python3-pip-whl", "python3-setuptools-whl", "python3-distutils", "python3-lib2to3")
"""What makes the base's pip, and is not in the base."""


def base_name() -> str:
    """What the Containerfiles are built on."""
    return Containerfile(IMAGES / "server.Containerfile").bases[0]


def make(podman: Podman) -> None:
    """Put the stand-in into podman's storage. Raises CannotRun where there is no mirror to make it from."""
    name = base_name()
    match = re.fullmatch(r"python:3\.(\d+)\.\d+-slim-(\w+)", name)
    assert match is not None, f"expected python:3.x.y-slim-RELEASE, got {name}"
    minor, release = match.groups()
    tree = podman.folder / "base"
    try:
        _debootstrap(tree, release, minor)
        _pip_as_in_the_base(tree, minor)
        archive = podman.folder / "base.tar"
        _run("tar", "--create", "--file", archive, "--directory", tree, ".")
        changes = [word for each in ENVIRONMENT for word in ("--change", f"ENV {each}")]
        podman("import", *changes, "--change", 'CMD ["python3"]', str(archive), name)
        archive.unlink()
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def mirrors() -> Iterable[str]:
    """Debian's mirrors that this machine is set to."""
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    texts = [workspace.read_text() for workspace in places if workspace.is_file()]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    return (url.rstrip("/") for line in lines for url in re.findall(r"https?://\S+/debian/?(?=\s|$)", line))


def _debootstrap(tree: Path, release: str, minor: str) -> None:
    mirror = next(iter(mirrors()), None)
    if mirror is None:
        raise CannotRun("apt of this machine is set to no mirror of Debian")
    packages = [
        "ca-certificates",
        "netbase",
        "tzdata",
        f"python3.{minor}",
        *(each.format(minor=minor) for each in BUILDING),
    ]
    done = _attempt("debootstrap", "--variant=minbase", f"--include={','.join(packages)}", release, tree, mirror)
    if done.returncode:
        raise CannotRun(f"debootstrap: {done.stdout[-300:]} {done.stderr[-300:]}")


def _pip_as_in_the_base(tree: Path, minor: str) -> None:
    """The real base has python, pip and setuptools in /usr/local; an environment made there looks the same."""
    _run("chroot", tree, f"python3.{minor}", "-m", "venv", "/usr/local")
    _run("chroot", tree, "dpkg", "--purge", "--force-depends", *(each.format(minor=minor) for each in BUILDING))
    for rubbish in (tree / "var/lib/apt/lists", tree / "var/cache/apt"):
        shutil.rmtree(rubbish, ignore_errors=True)


def _run(*command: str | Path) -> None:
    done = _attempt(*command)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}: {done.stderr[-2000:]}"


def _attempt(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LONG_S, check=False)


if __name__ == "__main__":
    kept = Podman(Path(sys.argv[1]).absolute())
    make(kept)
    kept.choose_runtime(base_name())
    sys.stdout.write(
        shlex.join(["env", f"CONTAINERS_CONF={kept.environment['CONTAINERS_CONF']}", *kept.command, "build"]) + "\n"
    )
