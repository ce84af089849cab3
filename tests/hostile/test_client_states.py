"""A cohort member that reports lost client states: it is excluded, and the honest clients' rounds are correct."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from typer.testing import CliRunner, Result

from fl_ops.commands.cli import app
from protos.codec import unpack
from protos.fl.v1 import admin_pb2, training_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from tests.hostile.attacks.client_states import attack
from tests.hostile.federation import HONEST, SIZE, Federation
from tests.hostile.target import target, under
from tests.processes.federation import TASK
from tests.processes.process import HERE, TIMEOUT_S, Workspace, eventually
from tests.processes.raw_client import RawClient

TWICE = 2
"""Lost states after which the tests' coordinator leaves a client out of a run."""
SCAFFOLD = {
    "algorithm": {"name": "scaffold"},
    "population": SIZE + 1,
    "round": {"sampling": "bernoulli", "rate": 1.0, "clients_per_round": None, "min_clients": SIZE, "deadline_s": 60.0},
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A coordinator that restarts states for one client twice, with five committed rounds between; three daemons."""
    with Workspace(tmp_path_factory.mktemp("hostile-states")) as workspace:
        yield Federation(workspace, states={"losses": TWICE, "rounds_between_restarts": 5})


class Member(threading.Thread):
    """A raw client that takes part in every round: it delivers zeros or reports its state as lost."""

    def __init__(self, client: RawClient, *, always: bool) -> None:
        """always: report a lost state for every assignment, not only for one that names a state."""
        super().__init__(daemon=True)
        self.client, self.always = client, always
        self.honest = threading.Event()
        """If set, it only delivers."""
        self.reports = self.refused = self.delivered = 0
        self.client.register(labels=HONEST)
        self.events = self.client.attend()

    def run(self) -> None:
        """Answer assignments until the connection ends."""
        try:
            for event in self.events:
                if event.HasField("assignment"):
                    self._answer(event.assignment)
        except (grpc.RpcError, ValueError):  # the coordinator died, or the test is over
            return

    def _answer(self, assignment: training_pb2.Assignment) -> None:
        if not self.honest.is_set() and (self.always or assignment.HasField("counted")):
            self._report(assignment)
            return
        layout, data = self.client.fetch(assignment.resources[0])
        zeros = {name: torch.zeros_like(value) for name, value in unpack(data, layout).items()}
        self.delivered += self.client.submit(self.client.update_of(assignment, zeros)).admitted

    def _report(self, assignment: training_pb2.Assignment) -> None:
        self.reports += 1
        lost = pb.WorkFailure(key=assignment.key, reason=pb.FAILURE_REASON_STATE_LOST, message="so it is")
        request = pb.ReportStatusRequest(session_id=self.client.session_id, failures=[lost])
        try:
            self.client.stub.ReportStatus(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            self.refused += 1


@contextmanager
def member(federation: Federation, name: str, *, always: bool = False) -> Iterator[Member]:
    """A hostile client that attends."""
    with federation.raw(name) as client:
        one = Member(client, always=always)
        one.start()
        yield one
    one.join(TIMEOUT_S)


def forget(federation: Federation, name: str) -> None:
    """Forget the client, so that the rounds of the next test do not wait for it."""
    with federation.server.admin() as admin:
        admin.clients.forget_client(name)


def replayed(federation: Federation, run: str, folder: Path) -> Result:
    """`fl simulate --replay` of a run with the honest daemons' data alone."""
    config = folder / "clients.toml"
    config.write_text(
        f'[task]\nname = "{TASK}"\n[simulation]\nclients = {SIZE}\nnames = "honest-{{index}}"\n'
        'partition = { method = "iid", seed = 1 }\n'
    )
    state = federation.server.settings["state_dir"]
    return CliRunner().invoke(app, ["simulate", str(config), "--replay", run, "--state-dir", state])


@pytest.mark.slow
def test_reports_without_end_change_nothing_for_the_honest(federation: Federation, undisturbed: list[str]) -> None:
    """The honest run ends with its own bits although a client reports everything that can be reported."""
    with under(attack, target(federation)):
        run = federation.begin_run()
        federation.still_works(undisturbed, run)
    assert {"states_restarted", "state_lost"}.isdisjoint(federation.server.history(run))
    lines = [event for event in federation.server.history("mallory") if event == "client_quarantined"]
    assert len(lines) <= 1


@pytest.mark.slow
def test_a_client_that_reports_a_lost_state_for_every_assignment(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state restarts, because none was named. The client is quarantined, and the bits are those of a replay."""
    monkeypatch.syspath_prepend(HERE)
    server = federation.server
    with member(federation, "liar", always=True) as liar:
        run = server.create("lied-to", **SCAFFOLD, labels=HONEST, stop={"rounds": 12})
        server.completed(run)
        assert "states_restarted" not in server.history(run)
        assert (liar.refused, liar.delivered) == (liar.reports, 0)
        assert server.client("liar").HasField("quarantine")
        assert server.client("liar").quarantine.refusals == liar.reports == 3
    forget(federation, "liar")
    result = replayed(federation, run, tmp_path)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_client_that_loses_its_state_again_and_again(federation: Federation) -> None:
    """It restarts the states twice, with a SIGKILL in between, and is excluded until an operator releases it."""
    server = federation.server
    with member(federation, "forgetful") as forgetful:
        run = server.create("restarted", **SCAFFOLD, labels=HONEST, stop={"rounds": 400})
        eventually(lambda: "states_restarted" in server.history(run), "the states restart")
        server.kill()
        assert forgetful.reports >= 1
    server.serve()
    with member(federation, "forgetful") as forgetful:
        eventually(lambda: "client_left_out" in server.history("forgetful"), "it is left out")
        eventually(lambda: server.history(run).count("states_restarted") == TWICE, "the states restart once more")
        done = server.run(run).rounds_done
        status = server.until(run, lambda status: status.rounds_done > done + 3, "the honest go on")
        assert list(status.states.first_left_out) == ["forgetful"]
        assert status.states.members == SIZE
        delivered = forgetful.delivered
        forgetful.honest.set()
        with server.admin() as admin:
            admin.call(admin_pb2.ReleaseClientRequest(client_id="forgetful"), admin_pb2.ReleaseClientResponse)
        eventually(lambda: forgetful.delivered > delivered, "it takes part again")
        server.until(run, lambda status: status.states.members == SIZE + 1, "its state is part of the sum")
        assert server.history(run).count("states_restarted") == TWICE
        with server.admin() as admin:
            admin.runs.stop_run(run, "the test has seen enough")
    forget(federation, "forgetful")
    assert all(daemon.exit_code is None for daemon in federation.daemons.values())
