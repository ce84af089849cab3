"""Which packages the images need: the requirements of pyproject.toml and all that these require, as installed here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("digits", "gates", "objects", "otel", "postgres", "privacy", "server", "web")
"""Extras of pyproject.toml for images. The others are for workstations."""
TORCH = ("torch", "torchvision")
"""The packages with other files for CPUs than for GPUs."""


def wanted(extra: str | None = None) -> list[str]:
    """The requirements of pyproject.toml: those of all programs, or those of an extra."""
    requirements: list[str] = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return requirements


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of the packages that the requirements need on this platform, themselves included, in canonical form.

    Raises PackageNotFoundError for a package that is not installed.
    """
    visited: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            for text in requires(name) or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)
    return {name for name, _ in visited}


def runtime() -> set[str]:
    """The packages of an image with all extras for images."""
    return closure([*wanted(), *(text for extra in EXTRAS for text in wanted(extra))])
