"""Processes of our own: started, watched, killed by id, and none left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.integration.forks import Forked, Program

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PATIENCE_S = 60.0
"""Until a test gives up: for a machine that is busy with others, never a claim about speed."""

T = TypeVar("T")


def eventually(probe: Callable[[], T | None], what: str, within_s: float = PATIENCE_S) -> T:
    """The first true value of `probe`, asked again and again; fails with `what` when none came in time."""
    ends = time.monotonic() + within_s
    while not (value := probe()):
        assert time.monotonic() < ends, f"not within {within_s:g} s: {what}"
        time.sleep(0.03)
    return value


class Process:
    """One of our programs as a process of its own, with its stdout and stderr in files."""

    forks = True
    """For speed; a forked program leaves without the interpreter's own end, so not where that is looked at."""

    def __init__(self, place: Place, name: str, module: str, path: Sequence[Path] = ()) -> None:
        self.name = name
        self.folder = place.folder
        self.config = self.folder / f"{name}.toml"
        self._module = module
        self._path = [*path, ROOT, HERE]
        self.under: Sequence[str] = ()
        """The command that it runs under, which becomes the process."""
        self.open_files: int | None = None
        """How many files it may have open, where it is forked; None: as many as the tests."""
        self._popen: subprocess.Popen[bytes] | Forked | None = None
        self._out, self._err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        place.processes.append(self)

    def start(self) -> Self:
        """Start it, once more after it ended; returns at once."""
        assert self._popen is None or self._popen.poll() is not None, f"{self.name} runs already"
        if self.forks and not self.under:
            files = self.folder, self._out, self._err
            arguments = ["--config", str(self.config)]
            self._popen = Forked(Program(self._module, arguments, self.environment(), *files, self.open_files))
            return self
        with self._out.open("ab") as out, self._err.open("ab") as err:
            self._popen = subprocess.Popen(
                self.command(), cwd=self.folder, env=self.environment(), stdout=out, stderr=err
            )
        return self

    def command(self) -> list[str]:
        """What is started, where it is not forked."""
        return [*self.under, sys.executable, "-m", self._module, "--config", str(self.config)]

    def environment(self) -> dict[str, str]:
        """What it is started with."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self._path)), "OMP_NUM_THREADS": "1"}

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._popen is not None
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._popen is None else self._popen.poll()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> int:
        """SIGTERM, and the exit code that came of it."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        assert self._popen is not None
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._popen is not None
        return self._popen.wait(PATIENCE_S)

    def clean_up(self) -> None:
        """Whatever state it is in: it ends here."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait(PATIENCE_S)

    def errors(self) -> str:
        """All that it wrote to stderr."""
        return self._err.read_text() if self._err.exists() else ""

    def events(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """The log lines of an event that have these fields, the oldest first."""
        lines = self._out.read_text().splitlines() if self._out.exists() else []
        parsed = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [each for each in parsed if each["event"] == event and fields.items() <= each.items()]

    def logged(self, event: str, count: int = 1, **fields: object) -> dict[str, Any]:
        """The `count`th log line of an event, once it is there. Fails at once if the process ends without it."""

        def probe() -> list[dict[str, Any]]:
            ended = self.exit_code is not None
            found = self.events(event, **fields)[count - 1 :]
            assert found or not ended, f"{self.name} ended with {self.exit_code} and never logged {event} {fields}"
            return found

        return eventually(probe, f"{self.name} logs {event} {fields}")[0]

    def tail(self, lines: int = 12) -> str:
        """The end of what it wrote, for a failed test's report."""
        texts = [path.read_text().splitlines()[-lines:] for path in (self._out, self._err) if path.exists()]
        return "\n".join(line[:250] for text in texts for line in text)


@dataclass
class Place:
    """A folder, and every process that was started in it."""

    folder: Path

    def __post_init__(self) -> None:
        self.processes: list[Process] = []
        ALL.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays behind, whatever happened."""
        for process in reversed(self.processes):
            process.clean_up()
        ALL.remove(self)


ALL: list[Place] = []
"""The places that are open, for the report of a failed test."""


def write_toml(path: Path, values: Mapping[str, Any]) -> None:
    """Settings as TOML: inline tables all the way down."""
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(str(value) if isinstance(value, Path) else value)


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`fl` with these arguments, as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    whole = [sys.executable, "-m", "fl_ops", *arguments]
    return subprocess.run(
        whole, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
