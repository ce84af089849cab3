"""Parsing of a coordinator's messages, so that no message can end the daemon or take unlimited memory.

Sizes are checked before parsing: a few bytes of a repeated field become a whole Python object.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from fl_common.units import counted

CONTROL_BYTES = 256 << 10
"""Largest message without tensors and without a manifest."""
TEXT_CHARS = 500
"""Length to which a text for the log is cut."""
_NANOS = 1_000_000_000

M = TypeVar("M", bound=Message)


class InvalidMessage(ValueError):
    """Bytes that are missing, too many, or cannot be parsed as the expected message."""


def parse(raw: bytes | None, kind: type[M], max_bytes: int = CONTROL_BYTES) -> M:
    """The parsed message. Raises InvalidMessage for bytes that are missing, too many, or of another kind."""
    name = kind.DESCRIPTOR.name
    if raw is None:
        raise InvalidMessage(f"expected a {name}, got no message")
    if len(raw) > max_bytes:
        raise InvalidMessage(f"expected a {name} of at most {max_bytes} bytes, got {len(raw)}")
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise InvalidMessage(f"expected a {name}, got {len(raw)} bytes that cannot be parsed") from None


def log_text(text: str, max_chars: int = TEXT_CHARS) -> str:
    """Text of a peer for the log: cut, with line ends, control and formatting characters escaped."""
    shown = text[:max_chars]
    if not shown.isprintable():
        escaped = (letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in shown)
        shown = "".join(escaped)
    return shown if len(text) <= max_chars else f"{shown}... ({counted(len(text), 'character')})"


CLOCKS_DIFFER_S = 60.0
"""A difference of clocks that matters: certificates and gates by the time of day have limits of minutes."""


def clocks_differ(there: Timestamp, now: float) -> str:
    """Both times, if a coordinator's clock and this one's differ; empty if they agree, or it said no time.

    now: Unix time here, seconds.
    """
    try:
        seconds = there.seconds - now
        if not there.seconds or abs(seconds) < CLOCKS_DIFFER_S:
            return ""
        times = [f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" for at in (now, there.seconds)]
    except (OverflowError, ValueError, OSError):
        return ""  # no time of a calendar
    return f"it is {times[0]} here and {times[1]} at the coordinator"


def seconds_of(duration: Duration) -> float:
    """A duration in seconds. It may be negative, or longer than any clock runs."""
    return duration.seconds + duration.nanos / _NANOS
