"""Numbers, times and names as the page shows them."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from fl_common.units import NOTHING, duration, percent, plain, size

__all__ = ["NOTHING", "ago", "axis_value", "base_metric", "count", "duration", "elapsed", "iso", "measured",
           "metric_title", "moment", "percent", "plain", "seconds_of", "size", "value"]  # fmt: skip

_SHARES = frozenset({"accuracy"})
_CLIENTS, _AVERAGED = "clients_", "averaged_"


def count(number: int) -> str:
    """A count with separators: 12,345."""
    return f"{number:,}"


def value(number: float | None) -> str:
    """A number with four digits: 0.1234; a dash for none."""
    if number is None:
        return NOTHING
    if not math.isfinite(number):
        return str(number)
    return f"{number:.4g}" if abs(number) < 100_000 else f"{number:.3e}"


def measured(number: float | None, metric: str) -> str:
    """A metric's value. An accuracy is a percentage."""
    return percent(number) if base_metric(metric) in _SHARES else value(number)


def base_metric(metric: str) -> str:
    """The metric of a statistic over clients, or of the averaged model: clients_accuracy_mean is of accuracy."""
    name = metric.removeprefix(_CLIENTS).removeprefix(_AVERAGED)
    for suffix in ("_mean", "_std", "_worst_decile"):
        name = name.removesuffix(suffix)
    return name


def metric_title(metric: str) -> str:
    """A metric in words: accuracy on clients, worst tenth."""
    name = "held-out loss" if metric == "loss" else base_metric(metric).replace("_", " ")
    if metric.startswith(_AVERAGED):
        return f"{name} of the averaged model"
    if not metric.startswith(_CLIENTS):
        return name
    ends = {"_mean": ", mean", "_std": ", spread", "_worst_decile": ", worst tenth"}
    model = " of the averaged model" if metric.startswith(f"{_CLIENTS}{_AVERAGED}") else ""
    return f"{base_metric(metric).replace('_', ' ')}{model} on clients" + next(
        (text for end, text in ends.items() if metric.endswith(end)), ""
    )


def axis_value(number: float | None, unit: str) -> str:
    """A value of a chart in its unit."""
    if number is None:
        return NOTHING
    texts = {"share": percent, "bytes": lambda n: size(int(n)), "seconds": duration}
    return texts.get(unit, value)(number)


def seconds_of(stamp: Timestamp) -> float:
    """Unix seconds; 0 for none."""
    return stamp.ToNanoseconds() / 1e9


def moment(stamp: Timestamp | float) -> str:
    """A time in UTC to the second: 2026-11-23 14:02:11 UTC; a dash for none."""
    seconds = stamp if isinstance(stamp, int | float) else seconds_of(stamp)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if seconds else NOTHING


def iso(stamp: Timestamp | float) -> str:
    """A time for the attribute `datetime`."""
    seconds = stamp if isinstance(stamp, int | float) else seconds_of(stamp)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ago(stamp: Timestamp | float, now: float | None = None) -> str:
    """How long ago in one unit: 12 s, 3 min, 5 h, 2 d; "in 4 h" for a later time; a dash for none."""
    seconds = stamp if isinstance(stamp, int | float) else seconds_of(stamp)
    if not seconds:
        return NOTHING
    past = (time.time() if now is None else now) - seconds
    text = _one_unit(abs(past))
    return f"{text} ago" if past >= 0 else f"in {text}"


def elapsed(seconds: float) -> str:
    """A time that a page counts by the second: 0 s, 59 s, 3 min 05 s."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else duration(whole)


def _one_unit(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"
