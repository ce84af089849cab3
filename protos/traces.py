"""What is traced at either end: nothing, and nothing is imported for it, unless OpenTelemetry's variables ask for it.

An assignment carries its round's place in the trace, and every call made for it carries that on in its metadata.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from protos.settings import SettingsError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class RoundSpan:
    """A round of one run, from its first draw to its commit; this one tells nobody."""

    traceparent = ""
    """How others refer to it, as W3C Trace Context writes it; empty where nothing is traced."""

    def phase(self, name: str) -> None:
        """The round is in another phase now."""

    def end(self, outcome: str) -> None:
        """The round is over: "committed", "abandoned", or "left" by a coordinator that goes before."""


class Traces:
    """One process's spans; this one has none."""

    def round(self, run: str, number: int) -> RoundSpan:  # noqa: ARG002 - what others need
        """A round begins."""
        return RoundSpan()

    @contextmanager
    def within(self, traceparent: str) -> Iterator[None]:  # noqa: ARG002 - likewise
        """What is called and done meanwhile is part of that round."""
        yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:  # noqa: ARG002 - likewise
        """Something that takes its time, if it is part of a round."""
        yield

    def server_interceptors(self) -> Sequence[Any]:
        """For a grpc.aio server, the outermost."""
        return ()

    def client_interceptors(self) -> Sequence[Any]:
        """For a grpc.aio channel."""
        return ()

    def close(self) -> None:
        """Send what is left, within a second."""


UNTRACED = Traces()


def open_traces(service: str, environment: Mapping[str, str] = os.environ) -> Traces:
    """Traces of this process, if an endpoint for them is named.

    Args:
        service: its name, unless OTEL_SERVICE_NAME has another.
        environment: OpenTelemetry's variables.

    Raises:
        SettingsError: traces are wanted, and the packages for them are not installed.
    """
    wanted = any(environment.get(name) for name in _ENDPOINTS)
    off = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
    if not wanted or any(environment.get(name, "").lower() == value for name, value in off.items()):
        return UNTRACED
    try:
        made: Traces = import_module("protos.otel").OtelTraces(service)
    except ImportError as error:
        raise SettingsError(
            f"{_ENDPOINTS[0]} asks for traces, and {error.name} is not installed: pip install 'impetus-fl[otel]', or "
            "unset it"
        ) from error
    return made
