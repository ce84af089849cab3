"""Lists and details as tables and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl

RUN = admin_pb2.RunStatus(run_id="digits-1", state=admin_pb2.RUN_STATE_RUNNING, rounds_done=12, bytes_down=5 << 20)
RUN.spec.task.name, RUN.spec.algorithm.name, RUN.spec.stop.rounds = "digits", "fedcm", 40
RUN.spec.stop.metric, RUN.spec.stop.lower_is_better = "accuracy", False
RUN.best.round, RUN.best.metrics["accuracy"] = 11, 0.9641
CLIENT = admin_pb2.ClientStatus(client_id="edge-3", state=admin_pb2.CLIENT_STATE_PRESENT, updates_counted=1234)
CLIENT.tasks.add(name="digits", train_examples=180)
ACCOUNT = admin_pb2.RoundAccount(
    norms={"update": 0.31, "update_smallest": 0.2, "update_largest": 0.55, "aggregate": 0.21, "direction": 0.9},
    cosine=0.73,
    assignments={"admitted": 48, "failed": 2, "lost": 1, "refused": 3},
    staleness={0: 48, 1: 2, 17: 1},
    seconds={"collecting": 82.0, "stepping": 17.9, "selecting": 0.1},
)
ENTRY = admin_pb2.HistoryEntry(actor="admin:alice", event="run_paused", subject="digits-1", detail="lunch")


def test_runs(admin: FakeAdmin, fl: Fl) -> None:
    """A run's row has its name, progress, accuracy and bytes."""
    admin.responses["ListRuns"] = admin_pb2.ListRunsResponse(runs=[RUN])
    text = fl("run", "list").stdout
    for expected in ("digits-1", "running", "fedcm", "12 of 40", "96.41 %", "5.0 MiB"):
        assert expected in text


def test_a_run_that_is_not_loaded_has_a_reason(admin: FakeAdmin, fl: Fl) -> None:
    """The list has its state, and the reason below the table; the other runs are listed as usual."""
    bad = admin_pb2.RunStatus(run_id="mine-1", reason="not loaded: task.name: expected a task that ...")
    bad.spec.task.name = "my_task:Wine"
    admin.responses["ListRuns"] = admin_pb2.ListRunsResponse(runs=[bad, RUN])
    text = fl("run", "list").stdout
    for expected in ("not loaded", "my_task:Wine", "mine-1: not loaded: task.name: expected a task", "12 of 40"):
        assert expected in text


@pytest.mark.parametrize(
    ("arguments", "method", "expected"), [("run", "ListRuns", "run create"), ("clients", "ListClients", "fl-client")]
)
def test_empty_lists(admin: FakeAdmin, fl: Fl, arguments: str, method: str, expected: str) -> None:
    """An empty list names the command that adds to it; in JSON it is an empty array."""
    admin.responses[method] = getattr(admin_pb2, f"{method}Response")()
    assert expected in fl(arguments, "list").stdout
    assert json.loads(fl(arguments, "list", "--json").stdout) == []


def test_show(admin: FakeAdmin, fl: Fl) -> None:
    """`fl run show` has the run and each of its rounds; the request asks for the rounds."""
    rounds = [admin_pb2.RoundSummary(round=n, accepted=2, seconds=61) for n in range(3)]
    admin.responses["GetRun"] = admin_pb2.GetRunResponse(run=RUN, rounds=rounds)
    text = fl("run", "show", "digits-1").stdout
    assert "96.41 % in round 11" in text
    assert text.count("1 min 01 s") == 3
    assert admin.requests == [
        admin_pb2.GetRunRequest(run_id="digits-1"),
        admin_pb2.ListRoundsRequest(run_id="digits-1", page_size=1000),
    ]


@pytest.mark.parametrize(("factor", "shown"), [(1.42, True), (1.0, False)])
def test_over_selection(admin: FakeAdmin, fl: Fl, factor: float, shown: bool) -> None:
    """If more clients are drawn than updates are needed, `fl run show` has the factor."""
    run = admin_pb2.RunStatus(run_id="a", over_selection=factor)
    admin.responses["GetRun"] = admin_pb2.GetRunResponse(run=run)
    assert ("1.42 clients for each update" in fl("run", "show", "a").stdout) == shown


def test_json_is_the_message(admin: FakeAdmin, fl: Fl) -> None:
    """The JSON parses back into the received message and includes fields without a value."""
    admin.responses["ListRuns"] = admin_pb2.ListRunsResponse(runs=[RUN])
    (read,) = json.loads(fl("run", "list", "--json").stdout)
    assert ParseDict(read, admin_pb2.RunStatus()) == RUN
    assert read["bytes_up"] == "0"


def test_clients(admin: FakeAdmin, fl: Fl) -> None:
    """A client's row has its state, its tasks and its counted updates."""
    admin.responses["ListClients"] = admin_pb2.ListClientsResponse(clients=[CLIENT])
    text = fl("clients", "list").stdout
    assert "present" in text
    assert "digits (180)" in text
    assert "1,234" in text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"banned": True}, "banned"),
        ({"draining": True}, "present, draining"),
        ({"availability": {"may_train": False}}, "present, may not train"),
        (
            {"availability": {"may_train": False, "reason": "UNAVAILABLE_REASON_POWER", "detail": "power: on battery"}},
            "present, may not train (power)",
        ),
        ({"availability": {"detail": "power: on battery"}, "note": "x"}, "power: on battery"),
        ({"availability": {"until": "2026-03-01T10:00:00Z"}}, "present, may not train until 2026-03-01"),
        ({"availability": {"reason": 77}}, "present, may not train (77)"),
        ({"availability": {"may_train": True, "detail": "y"}, "note": "x"}, " x "),
        ({"quarantine": {"until": "2026-03-01T10:00:00Z"}}, "present, quarantined until 2026-03-01"),
        ({"quarantine": {"reason": "3 updates refused in a row"}, "note": "x"}, "3 updates refused in a row"),
        ({"state": 77}, "77"),
    ],
)
def test_client_states(admin: FakeAdmin, fl: Fl, change: dict[str, Any], word: str) -> None:
    """The state is followed by what keeps the client from work; an unknown state is shown as its number."""
    client = ParseDict(change, admin_pb2.ClientStatus(client_id="edge-3", state=admin_pb2.CLIENT_STATE_PRESENT))
    admin.responses["ListClients"] = admin_pb2.ListClientsResponse(clients=[client])
    assert word in fl("clients", "list").stdout


@pytest.mark.parametrize(
    ("arguments", "method", "request_"),
    [
        (["ban", "a", "--reason", "r"], "BanClient", admin_pb2.BanClientRequest(client_id="a", reason="r")),
        (["unban", "a"], "UnbanClient", admin_pb2.UnbanClientRequest(client_id="a")),
        (["release", "a"], "ReleaseClient", admin_pb2.ReleaseClientRequest(client_id="a")),
        (["forget", "a"], "ForgetClient", admin_pb2.ForgetClientRequest(client_id="a")),
        (["drain", "a"], "DrainClient", admin_pb2.DrainClientRequest(client_id="a")),
        (["drain", "a", "--undo"], "DrainClient", admin_pb2.DrainClientRequest(client_id="a", undo=True)),
    ],
)
def test_client_commands(admin: FakeAdmin, fl: Fl, arguments: list[str], method: str, request_: Any) -> None:
    """Each command on a client sends its request and answers with one JSON object."""
    admin.responses[method] = getattr(admin_pb2, f"{method}Response")()
    result = fl("clients", *arguments, "--json")
    assert result.exit_code == 0
    assert isinstance(json.loads(result.stdout), dict)
    assert admin.requests == [request_]


@pytest.mark.parametrize(
    ("arguments", "method", "request_"),
    [
        (["resume", "a"], "ResumeRun", admin_pb2.ResumeRunRequest(run_id="a")),
        (["stop", "a", "--reason", "r"], "StopRun", admin_pb2.StopRunRequest(run_id="a", reason="r")),
        (["extend", "a", "--rounds", "10"], "ExtendRun", admin_pb2.ExtendRunRequest(run_id="a", rounds=10)),
        (["extend", "a", "--wall-time", "60"], "ExtendRun", admin_pb2.ExtendRunRequest(run_id="a", wall_time_s=60)),
    ],
)
def test_run_commands(admin: FakeAdmin, fl: Fl, arguments: list[str], method: str, request_: Any) -> None:
    """Each command on a run sends its request and answers with the run as it is now."""
    admin.responses[method] = getattr(admin_pb2, f"{method}Response")(run=RUN)
    assert json.loads(fl("run", *arguments, "--json").stdout)["run_id"] == "digits-1"
    assert admin.requests == [request_]


def test_history(admin: FakeAdmin, fl: Fl) -> None:
    """A run's history has actor, event and reason; the request is for that run only."""
    admin.responses["ListHistory"] = admin_pb2.ListHistoryResponse(entries=[ENTRY])
    text = fl("run", "history", "digits-1", "--limit", "5").stdout
    assert "admin:alice" in text
    assert "run_paused" in text
    assert "lunch" in text
    assert admin.requests == [admin_pb2.ListHistoryRequest(subject="digits-1", limit=5, page_size=1000)]


def test_foreign_text_is_inert(admin: FakeAdmin, fl: Fl) -> None:
    """Markup and escape sequences in a client's text are shown, not interpreted."""
    client = admin_pb2.ClientStatus(client_id="edge-3", note="[bold]\x1b[2Jx")
    admin.responses["ListClients"] = admin_pb2.ListClientsResponse(clients=[client])
    text = fl("clients", "list").stdout
    assert "\x1b" not in text
    assert "[bold]" in text


def test_one_client(admin: FakeAdmin, fl: Fl) -> None:
    """`fl clients show` has both daemons of a shared identity, their certificates, the work and the history."""
    answer = admin_pb2.GetClientResponse(client=CLIENT, history=[ENTRY], conflicts=7, contested=True)
    answer.work = "run digits-1, round 3, collecting: has an assignment"
    answer.session.address, answer.session.certificate_serial = "192.0.2.7:5000", "ab12"
    answer.session.certificate_end.seconds = 4_102_444_800
    answer.refused.address, answer.refused.instance_id = "198.51.100.9:6000", "cafe\x1b[2J"
    answer.standing.reason = "2 updates refused in a row"
    admin.responses["GetClient"] = answer
    text = fl("clients", "show", "edge-3").stdout
    for expected in (
        "edge-3", "192.0.2.7:5000", "serial ab12, expires on", "198.51.100.9:6000",
            "used this identity 7 times and still do",
        "run digits-1, round 3", "2 updates refused in a row", "run_paused",
    ):  # fmt: skip
        assert expected in text
    assert "\x1b" not in text
    assert admin.requests == [admin_pb2.GetClientRequest(client_id="edge-3", history=10)]
    assert (
        ParseDict(json.loads(fl("clients", "show", "edge-3", "--json").stdout), admin_pb2.GetClientResponse()) == answer
    )


def test_a_banned_client_that_is_forgotten(admin: FakeAdmin, fl: Fl) -> None:
    """The output states that the ban stays, and how to end it."""
    admin.responses["ForgetClient"] = admin_pb2.ForgetClientResponse(still_banned=True)
    text = fl("clients", "forget", "edge-3").stdout
    assert "forgot edge-3; it stays banned until `fl clients unban edge-3`" in text


def test_schedules_are_shown(admin: FakeAdmin, fl: Fl) -> None:
    """`fl run show` names each parameter that changes, with its values and rounds; other runs have no such line."""
    run = admin_pb2.RunStatus()
    run.CopyFrom(RUN)
    run.spec.planned_rounds = 40
    run.spec.algorithm.parameters.update({"alpha": 0.1, "eta_g": 1.0, "rho": 0.05})
    schedules = run.spec.algorithm.schedules
    schedules["alpha"].kind, schedules["alpha"].end = "cosine", 1.0
    schedules["eta_g"].kind, schedules["eta_g"].factor = "step", 0.5
    schedules["eta_g"].milestones.extend([10, 20])
    schedules["rho"].kind = "constant"
    admin.responses["GetRun"] = admin_pb2.GetRunResponse(run=run)
    text = " ".join(fl("run", "show", "digits-1").stdout.split())
    assert (
        "schedules alpha: 0.1 in round 0 to 1 in round 39, cosine; eta_g: 1, times 0.5 in rounds 10, 20; "
        "rho: 0.05 in every round"
    ) in text
    admin.responses["GetRun"] = admin_pb2.GetRunResponse(run=RUN)
    assert "schedules" not in fl("run", "show", "digits-1").stdout


def test_details_are_a_second_table(admin: FakeAdmin, fl: Fl) -> None:
    """One line for each round, with its own norms and drop-outs; --json always has them."""
    admin.responses["GetRun"] = admin_pb2.GetRunResponse(
        run=admin_pb2.RunStatus(run_id="r"),
        rounds=[admin_pb2.RoundSummary(round=0, attempts=2, account=ACCOUNT), admin_pb2.RoundSummary(round=1)],
    )
    assert "Cosine" not in fl("run", "show", "r").stdout
    text = fl("run", "show", "r", "--details").stdout
    line = next(line for line in text.splitlines() if "0.31 (0.2 to 0.55)" in line and "cosine" not in line)
    assert " ".join(line.split()) == "0 2 0.31 (0.2 to 0.55) 0.21 0.9 0.73 3 2 1 3 1 min 22 s 18.0 s"
    (first, _) = json.loads(fl("run", "show", "r", "--json").stdout)["rounds"]
    assert first["account"]["assignments"] == {"admitted": 48, "failed": 2, "lost": 1, "refused": 3}


def test_the_last_commit_has_an_age_while_the_run_goes_on(admin: FakeAdmin, fl: Fl) -> None:
    """After its end the age is not shown."""
    run = admin_pb2.RunStatus(run_id="a")
    run.latest.round, run.latest.committed.seconds = 7, 1000
    for ended in (0, 1001):
        run.ended.seconds = ended
        if not ended:
            run.ClearField("ended")
        admin.responses["GetRun"] = admin_pb2.GetRunResponse(run=run)
        line = next(line for line in fl("run", "show", "a").stdout.splitlines() if "last commit" in line)
        assert (line.rstrip().endswith(" ago"), "round 7, 1970" in line) == (not ended, True)


def test_versions_have_a_column_while_they_differ(admin: FakeAdmin, fl: Fl) -> None:
    """As in an upgrade in stages; otherwise they are in the details of a client only."""
    clients = [admin_pb2.ClientStatus(client_id=name, software=f"impetus 0.{name}.0") for name in ("1", "2")]
    admin.responses["ListClients"] = admin_pb2.ListClientsResponse(clients=clients)
    shown = fl("clients", "list", "--sort", "version").stdout
    assert "Version" in shown
    assert "0.2.0" in shown
    assert admin.requests[-1] == admin_pb2.ListClientsRequest(page_size=1000, order=admin_pb2.CLIENT_ORDER_VERSION)
    admin.responses["ListClients"] = admin_pb2.ListClientsResponse(clients=clients[:1])
    assert "Version" not in fl("clients", "list").stdout
    admin.responses["ListClients"] = admin_pb2.ListClientsResponse()
    assert "no client has software older than 0.2" in fl("clients", "list", "--older-than", "0.2").stdout
