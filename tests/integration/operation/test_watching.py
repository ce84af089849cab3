"""`fl run watch` across a coordinator that is killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes.federation import Fleet
from tests.processes.process import ROOT, TIMEOUT_S, eventually

LOST = "connection lost, waiting for the coordinator"


class Watch:
    """`fl run watch` as a process, with its lines in a file."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self.process, self._file = process, file

    def shows(self, text: str, count: int = 1) -> None:
        """Wait until a text was printed so many times. Fails at once if the watch ends without it."""

        def probe() -> bool:
            ended = self.process.poll() is not None
            found = self._file.read_text().count(text) >= count
            assert found or not ended, f"ended with {self.process.returncode}: {self._file.read_text()}"
            return found

        eventually(probe, f"the watch shows {text}")


@contextmanager
def watching(fleet: Fleet, run: str, folder: Path) -> Iterator[Watch]:
    """Watch a run from its snapshot on."""
    address, file = str(fleet.server.settings["admin_listen"]), folder / "watch.txt"
    command = [sys.executable, "-m", "fl_ops", "run", "watch", run, "--insecure", "--server", address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        file.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env=environment) as process,
    ):
        watch = Watch(process, file)
        try:
            watch.shows(f"watching {run}")
            yield watch
        finally:
            process.kill()


@pytest.mark.slow
def test_a_watch_goes_on_after_a_restart(fleet: Fleet, tmp_path: Path) -> None:
    """It waits while the coordinator is away, shows the rounds after the restart, and ends as the run does."""
    fleet.hold()
    fleet.server.create("restarted", stop={"rounds": 3})
    with watching(fleet, "restarted", tmp_path) as watch:
        fleet.server.kill()
        watch.shows(LOST)
        fleet.server.serve()
        watch.shows("watching restarted: 0 rounds done", 2)
        fleet.release()
        watch.shows("round 2 committed")
        assert watch.process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_ctrl_c_ends_the_wait(fleet: Fleet, tmp_path: Path) -> None:
    """The watch ends with 130 and states that the run goes on; it does when the coordinator is back."""
    fleet.hold()
    fleet.server.create("left-alone", stop={"rounds": 1})
    with watching(fleet, "left-alone", tmp_path) as watch:
        fleet.server.kill()
        watch.shows(LOST)
        watch.process.send_signal(signal.SIGINT)
        assert watch.process.wait(TIMEOUT_S) == 130
        watch.shows("the run goes on; `fl run stop left-alone` ends it")
    fleet.server.serve()
    fleet.release()
    fleet.server.completed("left-alone")
