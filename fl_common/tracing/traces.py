"""The interface of tracing for both programs, and tracing that is off.

An assignment carries the trace context of its round, and each call made for it carries that context in its metadata.
Tracing is off, and imports nothing, unless OpenTelemetry's variables enable it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fl_common.settings import SettingsError


class RoundSpan:
    """The span of one round, from the first sampled cohort to the commit. This one records nothing."""

    traceparent = ""
    """The context of the span in W3C Trace Context format; empty without tracing."""

    def phase(self, name: str) -> None:
        """The round enters a phase."""

    def end(self, outcome: str) -> None:
        """The round ends: "committed", "abandoned", or "left" by a coordinator that stops first."""


class Traces:
    """The spans of one process. This one records nothing."""

    def round(self, run: str, number: int) -> RoundSpan:  # noqa: ARG002 - the interface of OtelTraces
        """Start the span of a round."""
        return RoundSpan()

    @contextmanager
    def within(self, traceparent: str) -> Iterator[None]:  # noqa: ARG002 - the interface of OtelTraces
        """Calls and spans within the context belong to that round."""
        yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:  # noqa: ARG002 - the interface of OtelTraces
        """A span around the context, if a round is being traced."""
        yield

    def server_interceptors(self) -> Sequence[Any]:
        """Interceptors of a grpc.aio server; they go first."""
        return ()

    def client_interceptors(self) -> Sequence[Any]:
        """Interceptors of a grpc.aio channel."""
        return ()

    def close(self) -> None:
        """Send the remaining spans, within a second."""


UNTRACED = Traces()


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def open_traces(service: str, environment: Mapping[str, str] = os.environ) -> Traces:
    """The traces of this process; UNTRACED unless an endpoint is configured.

    Args:
        service: name of the service; OTEL_SERVICE_NAME overrides it.
        environment: OpenTelemetry's variables.

    Raises:
        SettingsError: traces are configured, and the packages for them are not installed.
    """
    wanted = any(environment.get(name) for name in _ENDPOINTS)
    off = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
    if not wanted or any(environment.get(name, "").lower() == value for name, value in off.items()):
        return UNTRACED
    try:
        from fl_common.tracing.otel import OtelTraces  # noqa: PLC0415 - its packages are optional
    except ImportError as error:
        raise SettingsError(
            f"{_ENDPOINTS[0]} asks for traces, and {error.name} is not installed: pip install 'impetus-fl[otel]', or "
            "unset it"
        ) from error
    return OtelTraces(service)
