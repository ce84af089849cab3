"""Finish an image's environment: check its torch, leave out what nothing runs, compile the rest.

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
"""Of torch/bin; torch.multiprocessing starts it. The others are torch's own tests."""
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
    if tools := BUILD_TOOLS & {each.name for each in distributions(path=[str(packages)])}:
        sys.exit(f"expected an environment without build tools, got {', '.join(sorted(tools))}")
    # Hashes that nobody compares, in place of times: a copy or a builder that sets other times would make Python
    # compile everything at every start, without a word. What is written for newer Pythons stays as it is.
    compileall.compile_dir(packages, quiet=2, workers=0, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)


def check(accelerator: str, cuda: str | None) -> None:
    """Refuse a build of torch that is not for `accelerator`; `cuda` is the version that it was made for, or None."""
    if accelerator == "cpu" and cuda:
        sys.exit(
            f"expected torch's build for CPUs, got the one for CUDA {cuda}, which is several times as large: name an "
            "index with builds for CPUs (--build-arg TORCH_INDEX=...)"
        )
    if accelerator == "cuda" and not cuda:
        sys.exit("expected torch's build for CUDA, got the one for CPUs: leave TORCH_INDEX out, or name another one")


def dispensable(packages: Path) -> list[Path]:
    """What only building against torch needs, and the tests of all packages."""
    torch = packages / "torch"
    programs = [path for path in (torch / "bin").glob("*") if path.name not in KEPT_PROGRAMS]
    building = [path for name in ("include", "share", "test") if (path := torch / name).exists()]
    tests = [path for path in packages.rglob("tests") if path.is_dir() and "tests" not in path.parent.parts]
    return [*programs, *building, *tests]


def shell_scripts(environment: Path) -> list[Path]:
    """What puts an environment into a shell: images have it in PATH."""
    return [path for path in (environment / "bin").iterdir() if path.stem.lower() == "activate"]


if __name__ == "__main__":
    main()
