"""Finish an image's environment: check its torch, remove unused files, compile the rest.

Runs in the build stage, with the environment's own Python.
"""

from __future__ import annotations

import argparse
import compileall
import shutil
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from py_compile import PycInvalidationMode

KEPT_PROGRAMS = frozenset({"torch_shm_manager"})
"""The programs of torch/bin that torch.multiprocessing starts. The others are torch's own tests."""
BUILD_TOOLS = frozenset({"pip", "setuptools", "wheel"})


def main() -> None:
    """Finish this interpreter's environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], required=True)
    accelerator = parser.parse_args().accelerator
    from torch.version import cuda  # noqa: PLC0415 - tests of this file need no torch

    check(accelerator, cuda)
    packages = Path(sysconfig.get_path("purelib"))
    for path in (*dispensable(packages), *shell_scripts(Path(sys.prefix))):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if tools := BUILD_TOOLS & {package.name for package in distributions(path=[str(packages)])}:
        sys.exit(f"expected an environment without build tools, got {', '.join(sorted(tools))}")
    # Unchecked hashes in place of times: a copy or a builder that sets other times would make Python compile everything
    # at every start, without a message. Files that only newer versions of Python can compile are left as they are.
    compileall.compile_dir(packages, quiet=2, workers=0, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)


def check(accelerator: str, cuda: str | None) -> None:
    """Refuse a build of torch that is not for `accelerator`; `cuda` is its CUDA version, or None."""
    if accelerator == "cpu" and cuda:
        sys.exit(
            f"expected torch's build for CPUs, got the one for CUDA {cuda}, which is several times as large: name an "
            "index with builds for CPUs (--build-arg TORCH_INDEX=...)"
        )
    if accelerator == "cuda" and not cuda:
        sys.exit("expected torch's build for CUDA, got the one for CPUs: omit TORCH_INDEX, or name another one")


def dispensable(packages: Path) -> list[Path]:
    """Return the files that only builds against torch need, and the tests of all packages."""
    torch = packages / "torch"
    programs = [path for path in (torch / "bin").glob("*") if path.name not in KEPT_PROGRAMS]
    building = [path for name in ("include", "share", "test") if (path := torch / name).exists()]
    tests = [path for path in packages.rglob("tests") if path.is_dir() and "tests" not in path.parent.parts]
    return [*programs, *building, *tests]


def shell_scripts(environment: Path) -> list[Path]:
    """Return the activation scripts; images have the environment in PATH."""
    return [path for path in (environment / "bin").iterdir() if path.stem.lower() == "activate"]


if __name__ == "__main__":
    main()
