"""`fl top`, `fl run watch` and `fl run plot` with a coordinator, in a pseudo terminal."""

from __future__ import annotations

import json
import signal
import struct
from pathlib import Path

import pytest

from tests.processes.federation import Fleet
from tests.processes.process import run_fl
from tests.processes.terminal import Terminal


@pytest.fixture
def connection(fleet: Fleet) -> list[str]:
    """Options of `fl` for the fleet's coordinator."""
    return ["--insecure", "--server", str(fleet.server.settings["admin_listen"])]


def test_a_walk_through_the_federation(fleet: Fleet, connection: list[str], tmp_path: Path) -> None:
    """A new run and each of its rounds appear by themselves; keys choose and open; q leaves a terminal as it was."""
    fleet.hold()
    fleet.server.create("walked", stop={"rounds": 2})
    with Terminal(["top", *connection], tmp_path) as terminal:
        terminal.shows("clients  3 present", "▸  walked", "running", "0 of 2", "waiting for edge-")
        fleet.release()
        terminal.shows("completed", "2 of 2")
        fleet.server.create("walked-again", stop={"rounds": 1})
        terminal.shows("walked-again", "1 of 1")
        terminal.type("\r")
        terminal.shows("last commit", "rounds")
        terminal.type("\x1b")
        terminal.shows("walked-again", "edge-2")
        terminal.type("\t\x1b[B\r")
        terminal.shows("edge-1", "last seen", "client_registered")
        terminal.type("q")
        assert terminal.ends() == 0
        assert terminal.is_as_before()


@pytest.mark.parametrize(("end", "code"), [("\x03", 130), (signal.SIGTERM, 130)], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_restores_the_terminal(
    fleet: Fleet, connection: list[str], tmp_path: Path, end: str | signal.Signals, code: int
) -> None:
    """The shell's screen, cursor and keys are back."""
    with Terminal(["top", *connection], tmp_path) as terminal:
        terminal.shows("3 present")
        assert not terminal.is_as_before()
        if isinstance(end, str):
            terminal.type(end)
        else:
            terminal.process.send_signal(end)
        assert terminal.ends() == code
        assert terminal.is_as_before()


def test_a_coordinator_that_restarts(fleet: Fleet, connection: list[str], tmp_path: Path) -> None:
    """The reason is shown while it is away, and the state when it is back."""
    with Terminal(["top", *connection], tmp_path) as terminal:
        terminal.shows("3 present")
        fleet.server.kill()
        terminal.shows("no connection")
        fleet.server.serve()
        terminal.shows("3 present")
        terminal.type("q")
        assert terminal.ends() == 0


def test_the_details_of_a_run_have_its_clients(fleet: Fleet, connection: list[str], tmp_path: Path) -> None:
    """Each client of the round with its phase: one has delivered, the other trains."""
    # Another seed makes another model, which no daemon has from a run before a restart of the coordinator.
    quick, slow = fleet.half_delivered("walked-into", seed=73, algorithm={"name": "fedavg"})
    with Terminal(["top", *connection], tmp_path, lines=50) as terminal:
        terminal.shows("walked-into")
        terminal.type("\r")
        terminal.shows("1 training, 1 delivered", f"{quick.client_id}  delivered", f"{slow.client_id}  training")
        terminal.type("q")
        assert terminal.ends() == 0


def test_without_a_terminal(fleet: Fleet, connection: list[str], tmp_path: Path) -> None:
    """One view, and a line that tells why; JSON for programs; no coordinator is an error as everywhere."""
    done = run_fl("top", *connection, folder=tmp_path)
    assert (done.returncode, "edge-0" in done.stdout, "\x1b" in done.stdout) == (0, True, False)
    assert "only where input and output are a terminal" in done.stderr
    found = json.loads(run_fl("top", "--json", *connection, folder=tmp_path).stdout)
    # Other tests of the worker may have left clients behind.
    assert {"edge-0", "edge-1", "edge-2"} <= {client["client_id"] for client in found["clients"]}
    assert run_fl("top", "--insecure", "--server", "127.0.0.1:1", folder=tmp_path).returncode == 3


@pytest.mark.slow
def test_a_watch_shows_clients_and_values(fleet: Fleet, connection: list[str], tmp_path: Path) -> None:
    """The clients of the round, a line of the metric from the first round on, and the time left."""
    quick, slow = fleet.half_delivered("seen", stop={"rounds": 3})
    with Terminal(["run", "watch", "seen", *connection], tmp_path) as terminal:
        terminal.shows("1 of 2", f"● {quick.client_id}", f"○ {slow.client_id} training")
        fleet.release()
        terminal.shows("completed", "loss █")
        assert terminal.ends() == 0
        assert terminal.is_as_before()
    with Terminal(["run", "watch", "seen", *connection], tmp_path, columns=120) as terminal:
        assert terminal.shows("3 rounds are done").count("committed") == 3
        assert terminal.ends() == 0


@pytest.mark.slow  # tests/fl_ops/render has the pictures without processes
@pytest.mark.parametrize("by", ["rounds", "bytes", "time"])
def test_a_picture_of_two_runs(fleet: Fleet, connection: list[str], tmp_path: Path, by: str) -> None:
    """A PNG of some size; an older file is kept; a run without values is refused and leaves no file."""
    names = [f"drawn-{by}-{number}" for number in range(2)]
    for name in names:
        fleet.server.completed(fleet.server.create(name, stop={"rounds": 2}))
    done = run_fl("run", "plot", *names, "--out", "a.png", "--by", by, *connection, folder=tmp_path)
    assert done.stdout == f"a.png: {names[0]} (2 rounds), {names[1]} (2 rounds)\n", done.stderr
    head = (tmp_path / "a.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", head[16:])) > 300
    again = run_fl("run", "plot", *names, "--out", "a.png", *connection, folder=tmp_path)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def test_nothing_to_draw(fleet: Fleet, connection: list[str], tmp_path: Path) -> None:
    """A run without a round leaves no file."""
    fleet.hold()
    fleet.server.create("empty")
    done = run_fl("run", "plot", "empty", "--out", "a.png", *connection, folder=tmp_path)
    assert (done.returncode, "nothing is drawn" in done.stderr) == (1, True)
    assert list(tmp_path.glob("*.png*")) == []
