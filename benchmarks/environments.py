"""Virtual environments of the other libraries, made once, with the same build of torch as here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

MARK = "installed"


class NotInstalled(Exception):
    """A library cannot be installed here; the message has the reason."""


def python_of(library: str, folder: Path, requirements: Sequence[str]) -> Path:
    """The interpreter of a library's environment in the folder, made if it is not there. Raises NotInstalled."""
    place = folder / library
    wanted = "\n".join([f"torch=={torch.__version__}", *requirements])
    mark, python = place / MARK, place / "bin" / "python"
    if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
        return python
    mark.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", str(place)])
    # The exact build of torch is a requirement too, so that no library brings another one, for example with CUDA.
    _run([str(python), "-m", "pip", "install", "--quiet", *wanted.split("\n")])
    mark.write_text(wanted, encoding="utf-8")
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NotInstalled(f"{' '.join(command[1:4])} failed: {''.join(last)}")
