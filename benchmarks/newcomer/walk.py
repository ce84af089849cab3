"""Walks one way: a shell executes its commands in an empty folder, with an empty home, and each is timed."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.newcomer.paths import HUB, Way

_KEPT = ("PIP_", "SSL_", "REQUESTS_", "XDG_CONFIG_DIRS", "LANG", "TMPDIR", "UV_", "OMP_")
"""Beginnings of the variables that a machine needs for its package index."""
_PROGRAMS = "/usr/local/bin:/usr/bin:/bin"
_LAST_LINES = 15


class Lost(Exception):
    """A way did not lead to a model; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class Walked:
    """One way, walked once."""

    way: str
    commands: int
    minutes: float
    installing_minutes: float
    """Of these, in `python3 -m venv`, `pip` and `uv pip`. Flower installs once more in `flwr run`."""
    seconds: dict[str, float]
    """By command, on the clock."""
    processor_s: float
    environment_mb: int
    """2^20 bytes, with the environments that Flower makes for its apps."""
    stand_in: bool
    """Whether Flower's hub was not reached, so that the benchmark's own app trained."""

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def walk(way: Way, python: Path) -> Walked:
    """Walk it. python: the interpreter that is python3 on the empty machine. Raises Lost."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        place = Path(folder, "work")
        place.mkdir()
        times = Path(folder, "times")
        script = [
            "set -e",
            *(f"date +%s.%N >> {times}\n{command}" for command in way.commands),
            f"date +%s.%N >> {times}",
        ]
        before = os.times()
        done = subprocess.run(  # noqa: S603 - our own commands
            ["/bin/sh", "-c", "\n".join(script)],
            cwd=place, env=_environment(Path(folder, "home"), python), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip
        after = os.times()
        _end_what_is_left(Path(folder, "home"))
        if done.returncode or way.ends not in done.stdout:
            last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
            raise Lost(f"{way.name}: expected {way.ends!r}, the shell ended with {done.returncode}:\n{last}")
        moments = [float(line) for line in times.read_text().split()]
        seconds = {command: end - begin for command, (begin, end) in zip(way.commands, pairwise(moments), strict=True)}
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        return Walked(
            way.name,
            len(way.commands),
            round((moments[-1] - moments[0]) / 60, 2),
            round(sum(took for command, took in seconds.items() if _installs(command)) / 60, 2),
            {command: round(took, 1) for command, took in seconds.items()},
            round(spent, 1),
            _megabytes(place / "env") + _megabytes(Path(folder, "home", ".flwr")),
            (place / HUB).exists(),
        )


def _installs(command: str) -> bool:
    return command.startswith(("pip ", "uv pip ", "python3 -m venv"))


def _end_what_is_left(home: Path) -> None:
    """End the programs that a way started and left: Flower's SuperLink goes on after its run."""
    mark = f"HOME={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGTERM)
        except OSError:
            continue  # it has ended, or it is another user's


def _environment(home: Path, python: Path) -> dict[str, str]:
    """Nothing of this shell but what the package index needs; pip's cache is in the home and therefore empty."""
    home.mkdir()
    programs = home / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(python)
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return {**kept, **quiet, "HOME": str(home), "PATH": f"{programs}:{_PROGRAMS}"}


def _megabytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) >> 20
