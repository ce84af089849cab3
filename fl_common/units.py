"""Numbers and times with readable units, and text from other machines made safe to print."""

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
    # The value is 1 to 1024 of the unit; rounded to 1024 it needs the next unit.
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
    """A time in the local time zone, to the second; a dash for none."""
    if not time.seconds:
        return NOTHING
    return datetime.fromtimestamp(time.seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def percent(share: float | None, digits: int = 2) -> str:
    """A share of 1 as 96.41 %; a dash for none."""
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def is_accuracy(metric: str) -> bool:
    """Whether a metric is an accuracy over all examples, of the latest or of the averaged model."""
    return metric in {"accuracy", "averaged_accuracy"}


def metric_name(metric: str) -> str:
    """A metric of an evaluation; the loss is named so that nobody takes it for the training loss."""
    return "held-out loss" if metric == "loss" else metric


def plain(text: str) -> str:
    """`text` on one line without control characters: a client's text must not control the operator's terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
