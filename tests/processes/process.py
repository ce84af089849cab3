"""Our programs as processes: started, observed, killed by id, and ended with the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

from tests.processes import planted
from tests.processes.forks import Forked, Program

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TIMEOUT_S = 120.0
"""A test fails after this wait: enough for a busy machine, and no claim about speed."""

T = TypeVar("T")


def eventually(probe: Callable[[], T | None], what: str, within_s: float = TIMEOUT_S) -> T:
    """Poll until `probe` returns a true value, and return it. Fails with `what` after the timeout."""
    began = time.monotonic()
    while not (value := probe()):
        waited = time.monotonic() - began
        assert waited < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(min(max(0.02, 0.1 * waited), 0.25))  # a probe may cost a connection: fewer of them in a long wait
    return value


class Process:
    """One of our programs as a process, with stdout and stderr in files."""

    forks = True
    """Fork the program, which is faster but skips the interpreter's shutdown. False for tests of that shutdown."""

    def __init__(self, workspace: Workspace, name: str, module: str, path: Sequence[Path] = ()) -> None:
        self.name = name
        self.folder = workspace.folder
        self.config = self.folder / f"{name}.toml"
        self._module = module
        self._path = [*path, ROOT, HERE]
        self.under: Sequence[str] = ()
        """A command that execs the program, such as setpriv."""
        self.open_files: int | None = None
        """Limit of open files of a forked process; None: that of the tests."""
        self._popen: subprocess.Popen[bytes] | Forked | None = None
        self._out, self._err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        workspace.processes.append(self)

    def start(self) -> Self:
        """Start or restart it; returns at once."""
        assert self._popen is None or self._popen.poll() is not None, f"{self.name} runs already"
        if self.forks and not self.under:
            files = self.folder, self._out, self._err
            self._popen = Forked(Program(self._module, self.arguments, self.environment(), *files, self.open_files))
            return self
        with self._out.open("ab") as out, self._err.open("ab") as err:
            self._popen = subprocess.Popen(
                self.command(), cwd=self.folder, env=self.environment(), stdout=out, stderr=err
            )
        return self

    def command(self) -> list[str]:
        """The command line of a program that is not forked."""
        return [*self.under, sys.executable, "-m", self._module, *self.arguments]

    @property
    def arguments(self) -> list[str]:
        """The program's arguments."""
        return ["--config", str(self.config)]

    def environment(self) -> dict[str, str]:
        """Environment variables."""
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
        """Send SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        assert self._popen is not None
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        assert self._popen is not None
        return self._popen.wait(TIMEOUT_S)

    def clean_up(self) -> None:
        """Kill it if it runs. Fails if others could see a secret in the list of processes or in the metrics."""
        if self._popen is not None and self._popen.poll() is None:
            shown = planted.command_line(self.pid) + self.metrics()
            self._popen.kill()
            self._popen.wait(TIMEOUT_S)
            planted.check_shown(shown, f"the command line or the metrics of {self.name}")

    def metrics(self) -> bytes:
        """Its page of metrics, if it has one and answers at once."""
        serving = self.events("serving")
        address = serving[-1].get("metrics_listen") if serving else None
        return planted.metrics_page(address) if address else b""

    def errors(self) -> str:
        """Its stderr."""
        return self._err.read_text() if self._err.exists() else ""

    def events(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """The log lines of an event with these fields, the oldest first."""
        lines = self._out.read_text().splitlines() if self._out.exists() else []
        named = (line for line in lines if f'"event": "{event}"' in line)  # few of the many lines are parsed
        parsed = [json.loads(line) for line in named if line.startswith("{") and line.endswith("}")]
        return [each for each in parsed if each["event"] == event and fields.items() <= each.items()]

    def logged(self, event: str, count: int = 1, **fields: object) -> dict[str, Any]:
        """Wait for the `count`th log line of an event. Fails at once if the process ends without it."""

        def probe() -> list[dict[str, Any]]:
            ended = self.exit_code is not None
            found = self.events(event, **fields)[count - 1 :]
            assert found or not ended, f"{self.name} ended with {self.exit_code} and never logged {event} {fields}"
            return found

        return eventually(probe, f"{self.name} logs {event} {fields}")[0]

    def tail(self, lines: int = 12) -> str:
        """The last lines of its output, for the report of a failed test."""
        texts = [
            path.read_text(errors="backslashreplace").splitlines()[-lines:]
            for path in (self._out, self._err)
            if path.exists()
        ]
        return "\n".join(line[:250] for text in texts for line in text)


@dataclass
class Workspace:
    """A folder and every process that was started in it; a context manager that ends them all."""

    folder: Path

    def __post_init__(self) -> None:
        self.processes: list[Process] = []
        self.secrets = planted.Secrets()
        OPEN_WORKSPACES.append(self)
        planted.OPEN.append(self.secrets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes. Fails if one of them has shown a secret."""
        with ExitStack() as last:
            last.callback(OPEN_WORKSPACES.remove, self)
            last.callback(planted.OPEN.remove, self.secrets)
            last.callback(self._check_logs)
            for process in self.processes:
                last.callback(process.clean_up)

    def _check_logs(self) -> None:
        for path in planted.log_files(self.folder):
            self.secrets.check(path.read_bytes(), path.name)


OPEN_WORKSPACES: list[Workspace] = []
"""For the report of a failed test."""


def write_toml(path: Path, values: Mapping[str, Any]) -> None:
    """Write settings as TOML with inline tables."""
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value) if isinstance(value, Path) else value)


def run_fl(
    *arguments: str, folder: Path, within_s: float = TIMEOUT_S, forks: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `fl` with these arguments as a process. forks: as of `Process`; False also if grpc must be imported anew."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    if forks:
        done = run_program("fl_ops", *arguments, folder=folder, environment=environment, within_s=within_s)
    else:
        whole = [sys.executable, "-m", "fl_ops", *arguments]
        done = subprocess.run(
            whole, cwd=folder, env=environment, capture_output=True, text=True, timeout=within_s, check=False
        )
    planted.check_shown((done.stdout + done.stderr).encode(), f"the output of fl {' '.join(arguments[:2])}")
    return done


def run_program(
    module: str,
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    within_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run one of our programs to its end, forked. environment: None for that of a daemon's process."""
    places = os.pathsep.join([str(ROOT), str(HERE)])
    environment = environment or {**os.environ, "PYTHONPATH": places}
    with TemporaryDirectory() as output:
        out, err = Path(output) / "out", Path(output) / "err"
        program = Forked(Program(module, arguments, environment, folder, out, err))
        try:
            code = program.wait(within_s)
        finally:
            program.kill()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())
