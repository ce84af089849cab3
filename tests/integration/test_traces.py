"""Spans of real rounds from real processes, as a collector gets them: one trace for each round, calls included."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.integration.harness import PRESENT, Coordinator, Daemon
from tests.integration.processes import eventually

pytest.importorskip("opentelemetry.instrumentation.grpc", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TWO = {"clients_per_round": 2, "min_clients": 2, "quorum": 2}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps (service, span) of all that comes."""

    def __init__(self):
        self.spans = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request, context):
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            came = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans.extend((names["service.name"], span) for span in came)
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id):
        """(service, name, name of the parent) of each span, sorted."""
        whole = [(service, span) for service, span in self.spans if span.trace_id == trace_id]
        names = {span.span_id: span.name for _, span in whole} | {b"": ""}
        return sorted((service, span.name, names.get(span.parent_span_id, "?")) for service, span in whole)

    def close(self):
        self._server.stop(None).wait()


@pytest.fixture
def collector(monkeypatch):
    """What the processes of the test are told to send their spans to."""
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield collector
    collector.close()


def federation(place, **settings):
    """A coordinator and two daemons that attend."""
    server = Coordinator(place, settings=settings).serve()
    shard = {"partition": {"method": "iid", "clients": 2, "seed": 1}}
    daemons = [Daemon(place, server, f"edge-{index}", shard={**shard, "index": index}).start() for index in range(2)]
    for daemon in daemons:
        eventually(lambda name=daemon.client_id: server.client(name).state == PRESENT, f"{daemon.client_id} attends")
    return server, daemons


@pytest.mark.slow
def test_a_round_is_one_trace(place, collector):
    """The round's phases, and under it what each daemon calls, with the coordinator's side below the daemon's."""
    server, daemons = federation(place)
    server.completed(server.create("traced", round=TWO, stop={"rounds": 2}))
    for process in (server, *daemons):
        assert process.terminate() == 0
    rounds = [span for service, span in collector.spans if span.name == "round"]
    told = [{each.key: each.value for each in span.attributes} for span in rounds]
    assert [(each["fl.run"].string_value, each["fl.round"].int_value) for each in told] == [
        ("traced", 0),
        ("traced", 1),
    ]
    assert {each["fl.outcome"].string_value for each in told} == {"committed"}
    path = "/fl.v1.Coordinator/"
    phases = [("fl-server", name, "round") for name in ("collecting", "committing", "stepping")]
    for span in rounds:
        trace = collector.trace(span.trace_id)
        assert [each for each in trace if each[1] in {"collecting", "committing", "stepping", "round"}] == sorted(
            [("fl-server", "round", ""), *phases]
        )
        assert trace.count(("fl-client", "training", "round")) == 2
        assert trace.count(("fl-client", path + "SubmitUpdate", "round")) == 2
        assert trace.count(("fl-server", path + "SubmitUpdate", path + "SubmitUpdate")) == 2
        fetches = trace.count(("fl-client", path + "FetchModel", "round"))
        assert fetches == trace.count(("fl-server", path + "FetchModel", path + "FetchModel")) >= 2
    everything = {span.trace_id for _, span in collector.spans}
    assert everything == {span.trace_id for span in rounds}


@pytest.mark.slow
def test_a_collector_that_is_away_harms_nothing(place, monkeypatch):
    """Rounds are committed, and the processes end in good order."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    server, daemons = federation(place, drain_grace_s=0.5)
    server.completed(server.create("untold", round=TWO, stop={"rounds": 1}))
    for process in (*daemons, server):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_nothing_is_imported_where_nothing_is_asked_for(place):
    """Off is the default, and costs nothing: a coordinator that serves has no module of OpenTelemetry mapped."""
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ
    server = Coordinator(place)
    blocked = place.folder / "blocked"
    (blocked / "opentelemetry").mkdir(parents=True)
    (blocked / "opentelemetry" / "__init__.py").write_text("raise ImportError('nobody asked for this')")
    server._path.insert(0, blocked)
    server.serve()
    assert server.terminate() == 0


def test_traces_without_the_packages_are_told_in_words(place, monkeypatch):
    """Exit code 2, on both sides, and what to install."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    server = Coordinator(place)
    server.settings["listen"] = "127.0.0.1:1"
    blocked = place.folder / "blocked"
    (blocked / "opentelemetry").mkdir(parents=True)
    (blocked / "opentelemetry" / "__init__.py").write_text("raise ImportError('gone', name='opentelemetry')")
    for process in (server, Daemon(place, server, "edge-1", path=[blocked])):
        if process is server:
            process._path.insert(0, blocked)
        assert process.start().wait() == 2
        assert "opentelemetry is not installed: pip install 'impetus-fl[otel]'" in process.errors()
