"""The observable parts of a coordinator: health, reflection, metrics, its log, and the command's tables."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.processes.federation import Coordinator, Fleet
from tests.processes.process import TIMEOUT_S, Workspace, run_fl

PORTS = {"listen": "fl.v1.Coordinator", "admin_listen": "fl.v1.Admin"}


@pytest.mark.parametrize("port", PORTS)
def test_health_is_serving_on_both_ports(fleet: Fleet, port: str) -> None:
    """The whole server and the service of the port by name."""
    with grpc.insecure_channel(fleet.server.settings[port]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", PORTS[port]):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_is_not_serving_while_a_coordinator_drains(workspace: Workspace) -> None:
    """A watcher receives NOT_SERVING before the end, also without an upload under way."""
    server = Coordinator(workspace).serve()
    with grpc.insecure_channel(server.settings["admin_listen"]) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        assert server.terminate() == 0
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_describes_the_services_if_enabled(workspace: Workspace) -> None:
    """A tool without our .proto files finds each port's service and its methods."""
    server = Coordinator(workspace, settings={"reflection": True}).serve()
    for port in PORTS:
        described(server, port)


def described(server: Coordinator, port: str) -> None:
    """The service of the port, by reflection alone."""
    with grpc.insecure_channel(server.settings[port]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert PORTS[port] in database.get_services()
        service = DescriptorPool(database).FindServiceByName(PORTS[port])
        wanted = {"listen": "SubmitUpdate", "admin_listen": "CreateRun"}[port]
        assert wanted in service.methods_by_name


def samples(server: Coordinator) -> list[Sample]:
    """Every sample of /metrics: name -> labels -> value."""
    with urllib.request.urlopen(f"http://{server.settings['metrics_listen']}/metrics", timeout=TIMEOUT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [sample for family in families for sample in family.samples]


def test_metrics_of_a_run(fleet: Fleet) -> None:
    """Rounds, assignments by final state, bytes, norms and evaluation of a run of three rounds of two clients."""
    run = fleet.server.create("measured")
    fleet.server.completed(run)
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for sample in samples(fleet.server)
        if sample.labels.get("run") == run
    }
    assert found["fl_rounds_total", (("outcome", "committed"), ("run", run))] == 3
    assert found["fl_assignments_total", (("run", run), ("state", "admitted"))] == 6
    assert found["fl_round", (("run", run),)] == 3
    assert found["fl_round_seconds_count", (("run", run),)] == 3
    assert found["fl_norm", (("of", "update"), ("run", run))] > 0
    accuracy = fleet.server.run(run).latest.metrics["accuracy"]
    assert found["fl_evaluation", (("metric", "accuracy"), ("run", run))] == accuracy


def test_no_metric_has_a_clients_name(fleet: Fleet) -> None:
    """10,000 clients must not make 10,000 series."""
    assert not [
        sample for sample in samples(fleet.server) for value in sample.labels.values() if value in fleet.daemons
    ]


def test_the_coordinators_log_has_a_line_for_each_round(fleet: Fleet) -> None:
    """One summary line for a committed round, with the model's digest as the admin service has it."""
    run = fleet.server.create("logged")
    digests = fleet.server.digests(run)
    lines = fleet.server.events("round_committed", run=run)
    assert digests == [line["model"] for line in lines]
    assert [2, 2, 2] == [line["accepted"] for line in lines]


def test_watching_by_command_ends_with_the_run(fleet: Fleet, tmp_path: Path) -> None:
    """`fl run create --watch --json` prints an object for each event; the exit code is the run's result."""
    (tmp_path / "run.toml").write_text(
        'name = "watched"\n[task]\nname = "tiny_task:Tiny"\n[local]\nlearning_rate = 0.2\n'
        "[round]\nclients_per_round = 3\n[stop]\nrounds = 2\n"
    )
    address = str(fleet.server.settings["admin_listen"])
    result = run_fl(
        "run", "create", "run.toml", "--watch", "--json", "--insecure", "--server", address, folder=tmp_path
    )
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert events[0]["event"] == "snapshot"
    assert [event["event"] for event in events].count("committed") == 2
    assert events[-1]["run"]["state"] == "RUN_STATE_COMPLETED"


def test_a_stopped_run_ends_a_watch_with_its_own_code(fleet: Fleet, tmp_path: Path) -> None:
    """Exit code 6 shows a script that an operator stopped the run."""
    fleet.hold()
    fleet.server.create("watch-stop")
    with fleet.server.admin() as admin:
        admin.runs.stop_run("watch-stop", "no more")
    address = str(fleet.server.settings["admin_listen"])
    result = run_fl("run", "watch", "watch-stop", "--json", "--insecure", "--server", address, folder=tmp_path)
    assert result.returncode == 6


def test_bytes_count_for_the_run_that_used_them(workspace: Workspace) -> None:
    """A run that never draws a client has no bytes; a run beside it with the same first model has all of its own."""
    fleet = Fleet(workspace, 1)
    waits = fleet.server.create("waits", round={"clients_per_round": 2, "min_clients": 2}, stop={"rounds": 2})
    goes = fleet.server.completed(
        fleet.server.create("goes", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 3})
    )
    rounds = fleet.server.rounds(goes.run_id)
    assert fleet.server.run(waits).bytes_down == 0
    assert [each.bytes_down for each in rounds] == [goes.bytes_down // 3] * 3
