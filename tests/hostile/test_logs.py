"""Logs and history under a flood of messages from one client, during an honest run."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
import pytest

from tests.hostile.attacks import log_flood
from tests.hostile.federation import Federation
from tests.hostile.target import target, under
from tests.processes.process import TIMEOUT_S, run_fl
from tests.processes.raw_client import RawClient

REPORTS = 40


@pytest.fixture
def mallory(federation: Federation) -> Iterator[RawClient]:
    """A client on the generated stubs that sends arbitrary messages."""
    with federation.raw("mallory") as client:
        yield client


def register(client: RawClient, number: int) -> str:
    """Register as a new process."""
    answer = client.stub.Register(log_flood.registration(client.client_id, number), timeout=TIMEOUT_S)
    return str(answer.session_id)


def test_a_flood_of_reports_is_a_few_lines(federation: Federation, undisturbed: list[str], mallory: RawClient) -> None:
    """Forty registrations and 2,560 failures of a thousand characters are a few lines."""
    server = federation.server
    log = server.folder / "server.out"
    run_id = server.create("reported", labels={"site": "nowhere"})
    before = log.stat().st_size
    for number in range(REPORTS):
        report = log_flood.report(register(mallory, number), run_id, number)
        mallory.stub.ReportStatus(report, timeout=TIMEOUT_S)
    assert log.stat().st_size - before < 100_000
    assert len(server.events("client_failed", client="mallory")) <= 20
    assert 0 < len(server.history("mallory")) <= 10
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [line for line in lines if not all(str(value).isprintable() for value in line.values())] == []
    federation.still_works(undisturbed, federation.begin_run())


def test_text_of_a_client_cannot_control_an_operators_terminal(federation: Federation, mallory: RawClient) -> None:
    """Labels, notes and history of `fl clients list`, `show` and `fl run history` come without control characters."""
    session_id = register(mallory, 1)
    with pytest.raises(grpc.RpcError):
        mallory.stub.ReportStatus(log_flood.report(session_id, "no-run", 1), timeout=TIMEOUT_S)
    alice = federation.pki.issue("admin", "alice")
    server = str(federation.server.settings["admin_listen"])
    how = ("--server", server, "--ca", str(alice.ca), "--cert", str(alice.cert), "--key", str(alice.key))
    for arguments in (("clients", "list"), ("clients", "show", "mallory"), ("run", "history", "mallory")):
        shown = run_fl(*arguments, *how, folder=federation.workspace.folder)
        assert shown.returncode == 0, shown.stderr
        assert "mallory" in shown.stdout or "client_" in shown.stdout
        assert all(line.isprintable() for line in shown.stdout.splitlines())


@pytest.mark.slow
def test_an_honest_run_beside_the_flood(federation: Federation, undisturbed: list[str]) -> None:
    """The honest run ends with its bits, and the log grows by less than a megabyte."""
    log = federation.server.folder / "server.out"
    before = log.stat().st_size
    with under(log_flood.attack, target(federation)):
        federation.still_works(undisturbed, federation.begin_run())
    assert log.stat().st_size - before < 1_000_000


def test_refusals_of_one_caller_are_folded(federation: Federation) -> None:
    """A hundred calls with a wrong name give twenty lines at most."""
    with federation.raw("eve") as eve:
        for _ in range(100):
            with pytest.raises(grpc.RpcError, match="is not allowed to do this"):
                eve.register(client_id="honest-0")
    refused = federation.server.events("rpc_refused", caller="client:eve", code="PERMISSION_DENIED")
    assert 0 < len(refused) <= 20
