"""Inputs that once failed: each file of corpus/ is named PARSER--WHAT.bin and given to its parser again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.all_parsers import all_parsers
from tests.fuzz.in_process import named, quiet, run_one
from tests.fuzz.live.frames import RawCall, exchange, message
from tests.fuzz.parser import Parser
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace, eventually

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.bin"))
FRAMES = [path for path in CORPUS if path.name.startswith("frames--")]
CHECK = b"".join(RawCall(b"/grpc.health.v1.Health/Check", message(b"")).frames())


@pytest.fixture(scope="module")
def parsers() -> Iterator[list[Parser]]:
    """All parsers but the handlers, which no file of the corpus needs yet."""
    with all_parsers("requests", "daemon", "files", "certificates", "security") as parsers:
        yield parsers


@pytest.mark.parametrize("path", [path for path in CORPUS if path not in FRAMES], ids=lambda path: path.stem)
def test_an_input_that_failed_is_refused_or_accepted(parsers: list[Parser], path: Path) -> None:
    """No exception but the declared ones."""
    with quiet() as faults:
        _, error = run_one(named(parsers, path.name.partition("--")[0]), path.read_bytes())
    assert error + faults.taken() == ""


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: path.stem)
def test_every_port_answers_after_frames_that_ended_its_server(workspace: Workspace, path: Path) -> None:
    """The bytes are sent to each port; afterwards a correct call is answered there, and the process is the same."""
    server = Coordinator(workspace, settings={"health_listen": "127.0.0.1:0"}).serve()
    for port in ("listen", "admin_listen", "health_listen"):
        address = str(server.settings[port])
        served = len(server.events("port_served_again"))
        exchange(address, path.read_bytes(), None)
        eventually(lambda: len(server.events("port_served_again")) > served, f"{port} is served again")  # noqa: B023 - called in this turn
        assert exchange(address, CHECK, None) == 0
    assert server.exit_code is None
