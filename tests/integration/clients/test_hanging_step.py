"""A training step that never ends: the device says so and takes no work, and operators see why it is left out."""

from __future__ import annotations

import re
from pathlib import Path

from protos.fl.v1 import admin_pb2
from tests.processes.federation import Daemon, Fleet
from tests.processes.process import Workspace, eventually, run_fl

EVERYBODY = {"sampling": "bernoulli", "rate": 1.0, "clients_per_round": None, "min_clients": 2, "deadline_s": 3.0}
STEP = r"training: a step has not ended \d+ s after its work was cancelled at tiny_task\.py, line \d+, in loss: restart"


class ImpatientFleet(Fleet):
    """Daemons that report a hanging step at once."""

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        daemon = super().daemon(index, size)
        daemon._module = "tests.processes.impatient_daemon"
        return daemon


def check_shown_to_operators(address: str, folder: Path) -> None:
    """`fl run show`, its history and `fl clients show` have the reason, once each."""

    def shown(*arguments: str) -> str:
        return run_fl(*arguments, "--insecure", "--server", address, folder=folder).stdout

    short = r"short rounds +1; round 0 has 2 of 3 updates: 1 cancelled; 1 of them: the deadline"
    assert re.search(short, shown("run", "show", "hangs"))
    assert "round 0 has 2 of 3 updates: 1 cancelled; 1 of them: the deadline" in shown("run", "history", "hangs")
    named = (re.split(r" {2,}", line, maxsplit=1) for line in shown("clients", "show", "edge-0").splitlines())
    lines = {pair[0]: pair[1] for pair in named if len(pair) > 1}
    assert lines["state"].startswith("present, quarantined until ")
    assert re.match(STEP, lines["why"])
    assert lines["note"].startswith("a deadline missed, the last one in run hangs round 0, after 3 s; ")


def test_a_device_whose_step_never_ends_is_left_out(workspace: Workspace, tmp_path: Path) -> None:
    """One deadline passes; then the device takes no work, is in quarantine, and the run goes on without it."""
    fleet = ImpatientFleet(workspace, 3, quarantine={"deadlines": 1})
    server, hung = fleet.server, fleet["edge-0"]
    hung.hold.touch()
    server.create("hangs", round=EVERYBODY, stop={"rounds": 3})
    hung.logged("training_hangs")
    server.completed("hangs")
    assert [(each.accepted, each.dropped) for each in server.rounds("hangs")] == [(2, 1), (2, 0), (2, 0)]
    assert len(hung.events("assignment")) == 1
    status = server.client("edge-0")
    assert re.match(STEP, status.availability.detail)
    assert status.quarantine.reason.startswith("a deadline missed, ")
    assert "its training hangs, or it is too slow for round.deadline_s" in status.note
    assert server.history("edge-0") == ["client_registered", "client_quarantined"]
    check_shown_to_operators(str(server.settings["admin_listen"]), tmp_path)
    hung.hold.unlink()
    hung.logged("training_goes_on")
    with server.admin() as admin:
        admin.call(admin_pb2.ReleaseClientRequest(client_id="edge-0"), admin_pb2.ReleaseClientResponse)
    eventually(lambda: server.client("edge-0").availability.may_train, "it may train again")
    server.create("again", round=EVERYBODY, stop={"rounds": 1})
    server.completed("again")
    assert server.rounds("again")[0].accepted == 3
