"""k8s/images/requirements: complete, in agreement with constraints.txt, and with a hash for every file."""

from __future__ import annotations

import re

import pytest
from packaging.utils import canonicalize_name

from k8s.supply_chain.closure import EXTRAS, TORCH, closure, wanted
from k8s.supply_chain.hashes import FOLDER, TOOLS, entries
from tests.test_dependencies import pins

FILES = {path.stem: path.read_text() for path in FOLDER.glob("*.txt")}
FOUND = {name: entries(text) for name, text in FILES.items()}


def versions(file: str) -> dict[str, str]:
    """Name -> version of a file."""
    return {name: lines.split(" ")[0].partition("==")[2].removeprefix("=") for name, lines in FOUND[file].items()}


def test_there_is_a_file_for_each_part() -> None:
    """Two builds of torch, the packages, one file for each extra of an image, and the build's tools."""
    assert set(FILES) == {"torch-cpu", "torch-cuda", "packages", "tools", *(f"extra-{extra}" for extra in EXTRAS)}


@pytest.mark.parametrize("file", FILES)
def test_every_line_belongs_to_a_package_with_hashes(file: str) -> None:
    """Nothing is left out when the file is read here, and no file names a package index."""
    lines = [line for line in FILES[file].splitlines() if not line.startswith("#")]
    assert "\n".join(lines) == "\n".join(FOUND[file].values())
    assert "://" not in FILES[file]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", lines) for lines in FOUND[file].values())


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_the_files_have_all_that_the_images_need(extra: str | None) -> None:
    """The packages of pyproject.toml and those that they require, and no others."""
    needed = closure(wanted()) if extra is None else closure(wanted(extra)) - closure(wanted())
    have = set(FOUND["packages"] if extra is None else FOUND[f"extra-{extra}"])
    assert have == needed - set(TORCH), "run `make hashes`"


@pytest.mark.parametrize("file", FILES)
def test_the_versions_are_the_tested_ones(file: str) -> None:
    """Each version is that of constraints.txt; CUDA's libraries are pinned here alone, because torch names them."""
    tested = pins()
    found = {name: version.removesuffix("+cpu") for name, version in versions(file).items()}
    unknown = {name for name in found if name not in tested}
    assert {name: version for name, version in found.items() if name in tested} == {
        name: tested[name] for name in found if name in tested
    }, "run `make hashes`"
    assert all(re.match(r"nvidia-|cuda-|triton$", name) for name in unknown)
    assert not unknown or file == "torch-cuda"


def test_the_tools_are_complete() -> None:
    """pip installs them without dependencies."""
    assert closure(TOOLS) <= set(FOUND["tools"]) | {canonicalize_name("pip")}


def test_both_builds_of_torch_are_the_same_release() -> None:
    """The CPU build has a local version, and torchvision is the same for both."""
    cpu, cuda = versions("torch-cpu"), versions("torch-cuda")
    assert cpu == {"torch": f"{cuda['torch']}+cpu", "torchvision": cuda["torchvision"]}
    assert FOUND["torch-cpu"]["torchvision"] == FOUND["torch-cuda"]["torchvision"]
    assert not set(FOUND["torch-cpu"]["torch"].split()) & set(FOUND["torch-cuda"]["torch"].split()[1:]) - {"\\"}
