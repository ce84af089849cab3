"""Numbers, metrics and times with readable units, and text from other machines made safe to print."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

_STEP = 1024
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
NOTHING = "-"
LOSS, ACCURACY = "loss", "accuracy"
BY_CLIENTS, OF_AVERAGED = "clients_", "averaged_"
"""These begin the names of the clients' metrics and of those of the averaged model, as the contract has them."""


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


def count(number: int) -> str:
    """A count with separators: 12,345."""
    return f"{number:,}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A count with its noun: 1 client, 12,345 clients. plural: where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def value(number: float | None) -> str:
    """A number with four digits: 0.1234; a dash for none."""
    if number is None:
        return NOTHING
    if not math.isfinite(number):
        return str(number)
    return f"{number:.4g}" if abs(number) < 100_000 else f"{number:.3e}"


def base_metric(metric: str) -> str:
    """The metric of a statistic over clients, or of the averaged model: clients_accuracy_mean is of accuracy."""
    name = metric.removeprefix(BY_CLIENTS).removeprefix(OF_AVERAGED)
    for suffix in ("_mean", "_std", "_worst_decile", "_best_decile"):
        name = name.removesuffix(suffix)
    return name


def measured(number: float | None, metric: str) -> str:
    """A metric's value. An accuracy is a percentage."""
    return percent(number) if base_metric(metric) == ACCURACY else value(number)


def metric_title(metric: str) -> str:
    """A metric in words: accuracy on clients, worst tenth. No one takes a held-out loss for the training loss."""
    name = base_metric(metric).replace("_", " ")
    if not metric.startswith((BY_CLIENTS, OF_AVERAGED)):
        return "held-out loss" if metric == LOSS else metric.replace("_", " ")
    model = " of the averaged model" if OF_AVERAGED in metric else ""
    if not metric.startswith(BY_CLIENTS):
        return f"{name}{model}"
    ends = {"_mean": ", mean", "_std": ", spread", "_worst_decile": ", worst tenth", "_best_decile": ", best tenth"}
    return f"{name}{model} on clients" + next((text for end, text in ends.items() if metric.endswith(end)), "")


def utc(seconds: float) -> str:
    """Unix seconds as date and time in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def plain(text: str) -> str:
    """`text` on one line without control characters: a client's text must not control the operator's terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
