"""Messages of a coordinator, read so that none of them can end the daemon or take memory without a limit.

A message is measured before it is parsed: parsed, a few bytes of a repeated field are a whole object.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from fl_client.errors import ProtocolMismatch, Unreachable
from protos.fl.v1 import coordinator_pb2 as pb

CONTROL_BYTES = 256 << 10
"""Largest message that carries no tensors and no table of contents."""
TEXT_CHARS = 500
"""Length to which a text for the log is cut."""
_SESSION_CHARS = 256
_NANOS = 1_000_000_000

M = TypeVar("M", bound=Message)


class UnreadableMessage(ValueError):
    """Bytes that are no message of the kind expected, or too many."""


def parsed(raw: bytes | None, kind: type[M], most: int = CONTROL_BYTES) -> M:
    """The message in the bytes of an answer or event. Raises UnreadableMessage."""
    name = kind.DESCRIPTOR.name
    if raw is None:
        raise UnreadableMessage(f"expected a {name}, got no message")
    if len(raw) > most:
        raise UnreadableMessage(f"expected a {name} of at most {most} bytes, got {len(raw)}")
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise UnreadableMessage(f"expected a {name}, got {len(raw)} bytes that are none") from None


def text(words: str, most: int = TEXT_CHARS) -> str:
    """Words for the log: cut, with line ends, control and formatting characters written as escapes."""
    cut = words[:most]
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)
    return shown if len(words) <= most else f"{shown}... ({len(words)} characters)"


def seconds_of(duration: Duration) -> float:
    """Seconds, whatever stands in it: it may be negative, or longer than any clock runs."""
    return duration.seconds + duration.nanos / _NANOS


def check_registration(response: pb.RegisterResponse, request: pb.RegisterRequest) -> None:
    """Raises ProtocolMismatch for a version that was not offered, Unreachable for a session that cannot be named."""
    offered = request.protocol
    if not offered.min <= response.protocol <= offered.max:
        raise ProtocolMismatch(
            f"expected protocol {offered.min} to {offered.max}, got {response.protocol}",
            (response.protocol, response.protocol),
        )
    if not 1 <= len(response.session_id) <= _SESSION_CHARS:
        raise Unreachable(f"expected a session id of 1 to {_SESSION_CHARS} characters, got {len(response.session_id)}")


def asked_for(response: pb.RegisterResponse, request: pb.RegisterRequest) -> list[pb.AttendResponse]:
    """Outcomes and ends of runs that the registration asked for, as events; others are passed over."""
    pending = {key.SerializeToString(deterministic=True) for key in request.pending}
    runs = {state.run_id for state in request.states}
    events: list[pb.AttendResponse] = []
    for outcome in response.outcomes:
        if (name := outcome.key.SerializeToString(deterministic=True)) in pending:
            pending.remove(name)
            events.append(pb.AttendResponse(outcome=outcome))
    for run_id in response.ended_runs:
        if run_id in runs:
            runs.remove(run_id)
            events.append(pb.AttendResponse(run_ended=pb.RunEnded(run_id=run_id)))
    return events
