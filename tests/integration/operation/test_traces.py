"""Spans of real rounds from real processes, as a collector receives them: one trace for each round, with its calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace

pytest.importorskip("opentelemetry.instrumentation.grpc", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TWO = {"clients_per_round": 2, "min_clients": 2, "quorum": 2}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps (service, span) of every received span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)
        self.address = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            came = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans.extend((names["service.name"], span) for span in came)
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: bytes) -> list[tuple[str, str, str]]:
        """(service, name, name of the parent) of each span, sorted."""
        whole = [(service, span) for service, span in self.spans if span.trace_id == trace_id]
        names = {span.span_id: span.name for _, span in whole} | {b"": ""}
        return sorted((service, span.name, names.get(span.parent_span_id, "?")) for service, span in whole)

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """The address to which the processes of the test send their spans."""
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield collector
    collector.close()


def federation(workspace: Workspace, **settings: Any) -> tuple[Coordinator, list[Daemon]]:
    """A coordinator and two daemons that attend."""
    server = Coordinator(workspace, settings=settings).serve()
    shard = {"partition": {"method": "iid", "clients": 2, "seed": 1}}
    daemons = [
        Daemon(workspace, server, f"edge-{index}", shard={**shard, "index": index}).start() for index in range(2)
    ]
    for daemon in daemons:
        server.until_present(daemon.client_id)
    return server, daemons


@pytest.mark.slow
def test_a_round_is_one_trace(workspace: Workspace, collector: Collector) -> None:
    """The round's phases, and under it what each daemon calls, with the coordinator's side below the daemon's."""
    server, daemons = federation(workspace)
    server.completed(server.create("traced", round=TWO, stop={"rounds": 2}))
    for process in (server, *daemons):
        assert process.terminate() == 0
    rounds = [span for service, span in collector.spans if span.name == "round"]
    attributes = [{each.key: each.value for each in span.attributes} for span in rounds]
    assert [(each["fl.run"].string_value, each["fl.round"].int_value) for each in attributes] == [
        ("traced", 0),
        ("traced", 1),
    ]
    assert {each["fl.outcome"].string_value for each in attributes} == {"committed"}
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
def test_a_missing_trace_collector_has_no_effect(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are committed, and the processes end normally."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    server, daemons = federation(workspace, drain_grace_s=0.5)
    server.completed(server.create("untold", round=TWO, stop={"rounds": 1}))
    for process in (*daemons, server):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_tracing_is_not_imported_without_settings(workspace: Workspace) -> None:
    """Tracing is off by default and costs nothing: a serving coordinator has no module of OpenTelemetry loaded."""
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ
    server = Coordinator(workspace)
    blocked = workspace.folder / "blocked"
    (blocked / "opentelemetry").mkdir(parents=True)
    (blocked / "opentelemetry" / "__init__.py").write_text("raise ImportError('not needed')")
    server._path.insert(0, blocked)
    server.serve()
    assert server.terminate() == 0


def test_tracing_without_its_packages_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs exit with 2 and name the package to install."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    server = Coordinator(workspace)
    server.settings["listen"] = "127.0.0.1:1"
    blocked = workspace.folder / "blocked"
    (blocked / "opentelemetry").mkdir(parents=True)
    (blocked / "opentelemetry" / "__init__.py").write_text("raise ImportError('gone', name='opentelemetry')")
    for process in (server, Daemon(workspace, server, "edge-1", path=[blocked])):
        if process is server:
            process._path.insert(0, blocked)
        assert process.start().wait() == 2
        assert "opentelemetry is not installed: pip install 'impetus-fl[otel]'" in process.errors()
