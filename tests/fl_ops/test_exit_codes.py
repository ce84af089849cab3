"""Exit codes and error texts of `fl`, against a coordinator with canned answers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_ops.errors import Exit
from protos.fl.v1 import admin_pb2, errors_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl

ROOT = Path(__file__).parents[2]
Status = grpc.StatusCode
RUN = admin_pb2.RunStatus(run_id="digits-1", state=admin_pb2.RUN_STATE_RUNNING, rounds_done=3)


def test_success_is_zero(admin: FakeAdmin, fl: Fl) -> None:
    """A successful command exits with 0, and its request has its arguments."""
    admin.responses["PauseRun"] = admin_pb2.PauseRunResponse(run=RUN)
    assert fl("run", "pause", "digits-1").exit_code == Exit.OK
    assert admin.requests == [admin_pb2.PauseRunRequest(run_id="digits-1")]


@pytest.mark.parametrize(
    ("code", "detail", "exit_code", "expected"),
    [
        pytest.param(Status.NOT_FOUND, errors_pb2.UnknownRun(run_id="digits-9"), 5, "fl run list", id="unknown-run"),
        pytest.param(
            Status.FAILED_PRECONDITION,
            errors_pb2.WrongRunState(run_id="digits-9", state="completed", allowed_states=["running", "paused"]),
            1,
            "running or paused",
            id="wrong-state",
        ),
        pytest.param(
            Status.PERMISSION_DENIED,
            errors_pb2.NotAllowed(identity="edge-3", needed="role admin"),
            4,
            "'edge-3' to do this; needed: role admin",
            id="not-an-admin",
        ),
        pytest.param(
            Status.INVALID_ARGUMENT,
            errors_pb2.InvalidField(field="round.close", expected="cohort or goal", came="never"),
            2,
            "round.close: expected cohort or goal, got never",
            id="invalid-field",
        ),
        pytest.param(Status.ALREADY_EXISTS, errors_pb2.UnknownRun(run_id="digits-9"), 1, "another --name", id="exists"),
        pytest.param(Status.UNAUTHENTICATED, None, 4, "fl ca issue admin", id="no-certificate"),
        pytest.param(Status.UNIMPLEMENTED, None, 1, "admin address", id="other-service"),
        pytest.param(Status.UNAVAILABLE, None, 3, "fl-server --config", id="unavailable"),
        pytest.param(Status.INTERNAL, None, 1, "INTERNAL", id="internal"),
        pytest.param(Status.NOT_FOUND, None, 5, "the server's text", id="round-not-found"),
    ],
)
def test_failures(admin: FakeAdmin, fl: Fl, code: Any, detail: Any, exit_code: int, expected: str) -> None:
    """Each failure of a call has its exit code and its remedy, on stderr alone; a detail is enough, without a text."""
    admin.fail("StopRun", code, "" if detail else "the server's text", detail)
    result = fl("run", "stop", "x", "--json")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert expected in result.stderr


def test_coordinators_own_sentence(admin: FakeAdmin, fl: Fl) -> None:
    """A coordinator's text is shown as it is, and nothing of the detail is repeated."""
    text = "round.close: expected cohort or goal, got never"
    detail = errors_pb2.InvalidField(field="round.close", expected="cohort or goal", came="never")
    admin.fail("ListRuns", Status.INVALID_ARGUMENT, text, detail)
    assert fl("run", "list").stderr == f"error: {text}\n"


def test_no_coordinator_listens(fl: Fl) -> None:
    """With no coordinator at the address, the error names the address and what to start."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        result = fl("run", "list", "--insecure", "--server", address)
    assert result.exit_code == Exit.UNREACHABLE
    assert address in result.stderr
    assert "fl-server --config" in result.stderr


@pytest.mark.parametrize(("given", "rate"), [([], None), (["--learning-rate", "0.05"], 0.05)])
def test_a_run_is_resumed_with_the_rate_that_is_given(
    admin: FakeAdmin, fl: Fl, given: list[str], rate: float | None
) -> None:
    """Without one the request has none, so that the run keeps its own."""
    admin.responses["ResumeRun"] = admin_pb2.ResumeRunResponse(run=RUN)
    assert fl("run", "resume", "digits-1", *given).exit_code == 0
    assert admin.requests == [admin_pb2.ResumeRunRequest(run_id="digits-1", learning_rate=rate)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "nonsense"],
        ["run", "show"],
        ["run", "extend", "x"],
        ["run", "resume", "x", "--learning-rate", "0"],
        ["run", "resume", "x", "--learning-rate", "inf"],
        ["--nonsense"],
    ],
)
def test_misuse(admin: FakeAdmin, fl: Fl, arguments: list[str]) -> None:
    """A wrong command line exits with 2 and sends no request."""
    assert fl(*arguments).exit_code == Exit.MISUSED
    assert admin.requests == []


def test_interrupt(admin: FakeAdmin, fl: Fl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C exits with 130 and without a traceback."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fl_ops.commands.coordinator.runs.show_until_end", interrupted)
    result = fl("run", "watch", "digits-1")
    assert result.exit_code == Exit.INTERRUPTED
    assert "Traceback" not in result.output


def test_version(fl: Fl) -> None:
    """`fl version` needs no coordinator and can print JSON."""
    assert set(json.loads(fl("version", "--json").stdout)) == {"impetus", "protocol", "python"}


def test_interrupted_process(admin: FakeAdmin) -> None:
    """A process that follows a quiet run ends at SIGINT with 130, and says that the run goes on."""
    over = threading.Event()

    def quiet_run() -> Iterator[admin_pb2.WatchRunResponse]:
        yield admin_pb2.WatchRunResponse(event="snapshot", run=RUN)
        over.wait()

    admin.responses["WatchRun"] = quiet_run()
    arguments = [sys.executable, "-m", "fl_ops", "run", "watch", "digits-1"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "watching digits-1: 3 rounds done\n"
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    over.set()
    assert process.returncode == Exit.INTERRUPTED
    assert errors == "interrupted: the run goes on; `fl run stop digits-1` ends it\n"


def test_light_start_and_quiet_stderr(admin: FakeAdmin) -> None:
    """A command that needs no torch does not wait for it, also if it fails. Of the transport's log nothing is shown."""
    admin.fail("ListRuns", Status.UNAVAILABLE, "draining")
    shown = "atexit.register(lambda: print('torch' in sys.modules))"
    check = f"import atexit, runpy, sys; {shown}; runpy.run_module('fl_ops', run_name='__main__')"
    arguments = [sys.executable, "-c", check, "run", "list"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.returncode, result.stdout) == (Exit.UNREACHABLE, "False\n"), result.stderr
    assert result.stderr.count("\n") == 1
