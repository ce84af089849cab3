"""The interface of tracing for both programs, and tracing that is off.

An assignment carries the trace context of its round, and each call made for it carries that context in its metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


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
