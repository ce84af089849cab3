"""A hostile operator controls runs only: no program starts, no value breaks a list, refusals are recorded."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from tests.hostile.attacks.operator import (
    MARKER,
    MODULE,
    admin_channel,
    attack,
    call,
    evil_module,
    impossible_values,
    programs,
)
from tests.hostile.federation import Federation
from tests.hostile.target import Target, target, under
from tests.processes.federation import TASK, Coordinator
from tests.processes.process import Workspace, write_toml

REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


@pytest.fixture(scope="module")
def eve(federation: Federation) -> Target:
    """A hostile operator with a certificate, and her module in the coordinator's working directory."""
    (federation.workspace.folder / f"{MODULE}.py").write_text(evil_module(MARKER))
    return replace(target(federation), certificates=federation.hostile("eve", "admin"))


def history(server: Coordinator, subject: str = "") -> list[tuple[str, str, str, str]]:
    """(actor, event, subject, reason), the oldest first."""
    with server.admin() as admin:
        return [(row.actor, row.event, row.subject, row.detail) for row in admin.history.list_history(subject, 0)]


def test_an_operator_cannot_run_programs(federation: Federation, undisturbed: list[str], eve: Target) -> None:
    """No program is started and no module imported for an admin's certificate; the honest run has its bits."""
    run_id = federation.begin_run()
    with under(attack, eve):
        federation.still_works(undisturbed, run_id)
    assert not (federation.workspace.folder / MARKER).exists()
    assert not federation.server.events("rpc_failed")
    refused = [row for row in history(federation.server, "shell") if row[1] == "run_refused"]
    assert refused[0][:3] == ("admin:eve", "run_refused", "shell")
    assert refused[0][3].startswith("task subprocess:run: task.name: expected a task that this coordinator may load")
    exports = [row for row in history(federation.server, run_id) if row[1] == "model_exported"]
    assert {row[0] for row in exports} == {"admin:eve"}
    assert len(exports) == len({row[3] for row in exports})
    with federation.server.admin() as admin:
        assert {run.spec.task.name for run in admin.runs.list_runs()} == {TASK}


def test_every_refusal_has_a_status_and_an_instruction(
    federation: Federation, undisturbed: list[str], eve: Target
) -> None:
    """INVALID_ARGUMENT for every program and every impossible value; the line names the key of server.toml."""
    run_id = federation.begin_run()
    with admin_channel(eve) as channel:
        for spec in programs():
            with pytest.raises(grpc.RpcError) as refused:
                admin_pb2_grpc.AdminStub(channel).CreateRun(admin_pb2.CreateRunRequest(spec=spec))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "listed under `tasks` in its server.toml" in str(refused.value.details())
        for method, request in impossible_values(run_id):
            assert call(channel, method, request) is grpc.StatusCode.INVALID_ARGUMENT, f"{method} {request}"
    assert not (federation.workspace.folder / MARKER).exists()
    federation.still_works(undisturbed, run_id)


def test_a_client_cannot_call_the_admin_port(federation: Federation) -> None:
    """With a client's certificate the operators' port refuses every one of the calls."""
    with admin_channel(target(federation)) as channel:
        codes = {call(channel, "CreateRun", admin_pb2.CreateRunRequest(spec=spec)) for spec in programs()}
    assert codes == {grpc.StatusCode.PERMISSION_DENIED}
    assert not (federation.workspace.folder / MARKER).exists()


def test_another_user_of_the_machine_cannot_run_programs(workspace: Workspace) -> None:
    """The quickstart's coordinator without certificates refuses the run, records that, and no file is created."""
    (workspace.folder / f"{MODULE}.py").write_text(evil_module(MARKER))
    server = Coordinator(workspace).serve()
    with grpc.insecure_channel(str(server.settings["admin_listen"])) as channel:
        for spec in programs():
            assert call(channel, "CreateRun", admin_pb2.CreateRunRequest(spec=spec)) in REFUSED
    assert not (workspace.folder / MARKER).exists()
    rows = [row for row in history(server) if row[1] == "run_refused"]
    assert len(rows) == len(list(programs()))
    assert {row[0] for row in rows} == {"admin"}


def test_an_impossible_run_is_not_written(workspace: Workspace) -> None:
    """After impossible extensions, and with a task that is no longer allowed, runs are listed, also after a restart."""
    server = Coordinator(workspace).serve()
    run_id = server.create("extended")
    with grpc.insecure_channel(str(server.settings["admin_listen"])) as channel:
        for method, request in impossible_values(run_id):
            assert call(channel, method, request) is grpc.StatusCode.INVALID_ARGUMENT
    server.kill()
    server.serve()
    assert server.run(run_id).spec.stop.rounds == 3
    server.kill()
    server.settings["tasks"] = []
    write_toml(server.config, server.settings)
    server.serve()
    with server.admin() as admin:
        (listed,) = admin.runs.list_runs()
    assert (listed.run_id, listed.state) == (run_id, admin_pb2.RUN_STATE_UNSPECIFIED)
    assert listed.reason.startswith("not loaded: task.name: expected a task that this coordinator may load")
    assert server.logged("run_not_loaded", run=run_id)
