"""Numbers and times as people read them, and text from elsewhere made safe to print."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

_STEP = 1024
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
NOTHING = "-"


def size(count: int) -> str:
    """Bytes: 512 B, 1.5 KiB, 43 MiB."""
    if count < _STEP:
        return f"{count} B"
    # 1 to 1024 of a unit, so that rounding up may still want the next one.
    power = max(1, (count.bit_length() - 1) // 10)
    if round(count / _STEP**power) == _STEP:
        power += 1
    value = count / _STEP**power
    digits = 1 if round(value, 1) < 10 else 0
    return f"{value:.{digits}f} {_BINARY[power - 1]}"


def duration(seconds: float) -> str:
    """Seconds: 0.42 s, 12.3 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    tenths = round(seconds, 1)
    if tenths < _MINUTE:
        return f"{seconds:.2f} s" if tenths < 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def moment(time: Timestamp) -> str:
    """A time in the reader's own zone, to the second; a dash for none."""
    if not time.seconds:
        return NOTHING
    return datetime.fromtimestamp(time.seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def percent(share: float | None, digits: int = 2) -> str:
    """A share of 1 as 96.41 %; a dash for none."""
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def plain(text: str) -> str:
    """`text` on one line without control characters: what a client wrote must not steer the operator's terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
