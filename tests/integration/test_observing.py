"""What others can see of a coordinator: health, reflection, metrics, its log, and the command's tables."""

from __future__ import annotations

import json
import urllib.request

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.harness import Coordinator
from tests.integration.processes import command

PORTS = {"listen": "fl.v1.Coordinator", "admin_listen": "fl.v1.Admin"}


@pytest.mark.parametrize("port", PORTS)
def test_health_says_serving_on_both_ports(fleet, port):
    """The whole server and the service of the port by name."""
    with grpc.insecure_channel(fleet.server.settings[port]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", PORTS[port]):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_says_not_serving_while_a_coordinator_drains(place):
    """SIGTERM with an upload under way is not needed: whoever watches sees NOT_SERVING before the end."""
    server = Coordinator(place).serve()
    with grpc.insecure_channel(server.settings["admin_listen"]) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        assert server.terminate() == 0
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_describes_the_services_where_it_is_asked_for(place):
    """A tool without our .proto files finds each port's service and its methods."""
    server = Coordinator(place, settings={"reflection": True}).serve()
    for port in PORTS:
        described(server, port)


def described(server, port):
    """The service of the port, by reflection alone."""
    with grpc.insecure_channel(server.settings[port]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert PORTS[port] in database.get_services()
        service = DescriptorPool(database).FindServiceByName(PORTS[port])
        wanted = {"listen": "SubmitUpdate", "admin_listen": "CreateRun"}[port]
        assert wanted in service.methods_by_name


def samples(server):
    """Every sample of /metrics: name -> labels -> value."""
    with urllib.request.urlopen(f"http://{server.settings['metrics_listen']}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return [sample for family in families for sample in family.samples]


def test_metrics_tell_what_a_run_did(fleet):
    """Rounds, assignments by final state, bytes, norms and evaluation of a run of four rounds of two clients."""
    run = fleet.server.create("measured")
    fleet.server.completed(run)
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for sample in samples(fleet.server)
        if sample.labels.get("run") == run
    }
    assert found["fl_rounds_total", (("outcome", "committed"), ("run", run))] == 4
    assert found["fl_assignments_total", (("run", run), ("state", "admitted"))] == 8
    assert found["fl_round", (("run", run),)] == 4
    assert found["fl_round_seconds_count", (("run", run),)] == 4
    assert found["fl_norm", (("of", "update"), ("run", run))] > 0
    accuracy = fleet.server.run(run).latest.metrics["accuracy"]
    assert found["fl_evaluation", (("metric", "accuracy"), ("run", run))] == accuracy


def test_no_metric_has_a_clients_name(fleet):
    """10,000 clients must not make 10,000 series."""
    assert not [
        sample for sample in samples(fleet.server) for value in sample.labels.values() if value in fleet.daemons
    ]


def test_the_coordinators_log_has_a_line_for_each_round(fleet):
    """One summary line for a committed round, with the model's digest as the admin service has it."""
    run = fleet.server.create("logged")
    digests = fleet.server.digests(run)
    lines = fleet.server.events("round_committed", run=run)
    assert digests == [line["model"] for line in lines]
    assert [2, 2, 2, 2] == [line["accepted"] for line in lines]


def test_watching_by_command_ends_with_the_run(fleet, tmp_path):
    """`fl run create --watch --json` prints an object for each event, ends by itself, and its exit code says how."""
    (tmp_path / "run.toml").write_text(
        'name = "watched"\n[task]\nname = "tiny_task:Tiny"\n[local]\nlearning_rate = 0.2\n'
        "[round]\nclients_per_round = 3\n[stop]\nrounds = 2\n"
    )
    address = str(fleet.server.settings["admin_listen"])
    result = command(
        "run", "create", "run.toml", "--watch", "--json", "--insecure", "--server", address, folder=tmp_path
    )
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert events[0]["event"] == "snapshot"
    assert [event["event"] for event in events].count("committed") == 2
    assert events[-1]["run"]["state"] == "RUN_STATE_COMPLETED"


def test_a_stopped_run_ends_a_watch_with_its_own_code(fleet, tmp_path):
    """Exit code 6, so that a script knows that an operator stopped it."""
    fleet.hold()
    fleet.server.create("watch-stop")
    with fleet.server.admin() as admin:
        admin.stop_run("watch-stop", "no more")
    address = str(fleet.server.settings["admin_listen"])
    result = command("run", "watch", "watch-stop", "--json", "--insecure", "--server", address, folder=tmp_path)
    assert result.returncode == 6
