"""Tracing with OpenTelemetry, exported by OTLP over gRPC. Imported only when tracing is enabled."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.grpc import aio_client_interceptors, aio_server_interceptor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fl_common.proxies import channel_options, proxy_for
from fl_common.tracing.traces import RoundSpan, Traces

CLOSE_S = 1.0
"""Time to send the remaining spans at the end: an unreachable collector must not delay the exit."""
_PARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelTraces(Traces):
    """Spans of calls, by the standard instrumentation, and of rounds. OTEL_* variables set endpoint and sampling."""

    def __init__(self, service: str) -> None:
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(channel_options=_channel_options())
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("impetus")

    def round(self, run: str, number: int) -> RoundSpan:
        """See Traces."""
        attributes: dict[str, str | int] = {"fl.run": run, "fl.round": number}
        return _OtelRoundSpan(self._tracer, self._tracer.start_span("round", context.Context(), attributes=attributes))

    @contextmanager
    def within(self, traceparent: str) -> Iterator[None]:
        """See Traces."""
        token = context.attach(_PROPAGATOR.extract({_PARENT: traceparent}, context.Context()))
        try:
            yield
        finally:
            context.detach(token)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """See Traces."""
        if not _in_a_trace():
            yield
            return
        with self._tracer.start_as_current_span(name):
            yield

    def server_interceptors(self) -> Sequence[Any]:
        """See Traces. Only calls that belong to a trace are traced: a stream may stay open for days."""

        def in_a_trace(call: Any) -> bool:
            return any(key == _PARENT for key, _ in call.invocation_metadata)

        made = aio_server_interceptor(tracer_provider=self._provider, filter_=in_a_trace)
        return (made,)

    def client_interceptors(self) -> Sequence[Any]:
        """See Traces. Only calls within a trace are traced."""
        return tuple(aio_client_interceptors(tracer_provider=self._provider, filter_=_in_a_trace))

    def close(self) -> None:
        """See Traces."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _OtelRoundSpan(RoundSpan):
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer, self._span = tracer, span
        self._context = trace.set_span_in_context(span, context.Context())
        self._phase: trace.Span | None = None
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        self.traceparent = carrier[_PARENT]

    def phase(self, name: str) -> None:
        """See RoundSpan."""
        self._end_phase()
        self._phase = self._tracer.start_span(name, self._context)

    def end(self, outcome: str) -> None:
        """See RoundSpan."""
        self._end_phase()
        self._span.set_attribute("fl.outcome", outcome)
        self._span.end()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.end()


def _channel_options() -> Any:
    """Options of the exporter's channel: a collector on this machine is never behind a proxy."""
    named = (os.environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("TRACES_", ""))
    endpoint = next((text for text in named if text), "")
    address = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    if not address.hostname:
        return None
    return tuple(channel_options(proxy_for(f"{address.hostname}:{address.port or 4317}")).items())


def _in_a_trace(_: object = None) -> bool:
    return trace.get_current_span().get_span_context().is_valid
