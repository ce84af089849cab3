"""pyproject.toml, constraints.txt and the generated code agree on versions."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from protos.fl.v1 import coordinator_pb2_grpc

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def wanted() -> list[Requirement]:
    """Every requirement of pyproject.toml with extras, without the project itself."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found = [Requirement(text) for texts in lists for text in texts]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def pins() -> dict[str, str]:
    """constraints.txt as name -> version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    named = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in named}


@pytest.mark.parametrize("requirement", wanted(), ids=str)
def test_a_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    """Each tested version is in the range of pyproject.toml."""
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_pins_fit_every_build() -> None:
    """A local version such as 2.13.0+cpu would keep GPU users from the CUDA build of the same release."""
    assert [version for version in pins().values() if "+" in version] == []


def test_no_grpc_older_than_the_generated_code_is_allowed() -> None:
    """The generated code refuses an older grpc at run time; pip must refuse it before."""
    (grpcio,) = [requirement for requirement in wanted() if requirement.name == "grpcio"]
    assert str(grpcio.specifier) == f">={coordinator_pb2_grpc.GRPC_GENERATED_VERSION}"
