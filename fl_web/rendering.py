"""The templates, with the numbers, times and small pictures that only a page shows. Every text is escaped.

Words and facts are those of `fl_web.facts`. A short form has the whole value as a hover text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from google.protobuf.timestamp_pb2 import Timestamp
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fl_common import units
from fl_common.units import NOTHING, duration, percent, size, utc, value
from fl_web.charts import thinned
from fl_web.facts import client, client_work, release, rounds, run, words
from fl_web.facts.rounds import Round, seconds_of
from protos.fl.v1 import admin_pb2 as pb

STATIC = Path(__file__).parent / "static"


def rendered(template: str, context: Mapping[str, Any]) -> str:
    """The text of a template."""
    return environment().get_template(template).render(context)


def load_templates() -> None:
    """Compile all templates, so that the first page does not wait for it."""
    for name in environment().list_templates():
        environment().get_template(name)


@cache
def environment() -> Environment:
    """The environment of all templates. A name that a view does not set is an error."""
    made = Environment(
        loader=PackageLoader("fl_web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.filters["path"] = _path
    made.globals.update(
        ago=ago, alike_words=words.alike_words, axis_value=axis_value, by_phase=run.by_phase,
        epsilon=client_work.epsilon,
        came_last=client_work.came_last, client_marks=client.marks, client_note=client.note,
        client_state=words.client_state, coded=coded, count=units.count,
        counted=units.counted, delivered=run.delivered, duration=duration,
        elapsed=elapsed, evaluated_metrics=rounds.evaluated_metrics, evaluated_summary=rounds.evaluated_summary,
        event_detail=words.event_detail, event_tone=words.event_tone, event_words=words.event_words,
        failed=client_work.failed, iso=iso, known=words.known, label_texts=client.label_texts,
        mark_words=words.mark_words, measured=units.measured, metric_of=rounds.metric_of,
        metric_title=units.metric_title, moment=moment, NOTHING=NOTHING, plain=units.plain,
        device_metric=release.device_metric,
        release_devices=release.devices_text, release_from=release.round_text, release_labels=release.labels_text,
        release_metric=release.metric_text, release_rules=release.rules_text, release_state=release.state_text,
        run_state=words.run_state, sample=sample, seconds_of=seconds_of, shortened=words.shortened,
        shown_metric=rounds.shown_metric, size=size, spark=spark, static=static_address, time_left=run.time_left,
        told=told, tone=words.tone, transfer_seconds=client_work.transfer_seconds, trend=trend, trend_of=trend_of,
        value=value, who_words=words.who, work_seconds=client_work.work_seconds, worst_first=rounds.worst_first,
    )  # fmt: skip
    return made


def _path(text: str) -> str:
    """A text as a part of a path."""
    return quote(text, safe="")


def sample(rounds: list[Any], most: int) -> list[Any]:
    """Select at most so many of a list, evenly, with the first and the last, the newest first."""
    step = [float(index) for index in range(len(rounds))]
    return [rounds[index] for index in reversed(thinned(step, step, most))]


def static_address(name: str) -> str:
    """The address of a static file, with a part of its hash: a browser keeps it until it changes."""
    return f"/static/{name}?v={_digest(name)}"


@cache
def _digest(name: str) -> str:
    return sha256((STATIC / name).read_bytes()).hexdigest()[:12]


def axis_value(number: float | None, unit: str) -> str:
    """A value of a chart in its unit."""
    if number is None:
        return NOTHING
    texts = {"share": percent, "bytes": lambda n: size(int(n)), "seconds": duration}
    return texts.get(unit, value)(number)


def moment(stamp: Timestamp | float) -> str:
    """A time in UTC to the second: 2026-11-23 14:02:11 UTC; a dash for none."""
    seconds = stamp if isinstance(stamp, int | float) else seconds_of(stamp)
    return utc(seconds) if seconds else NOTHING


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


def coded(text: str) -> Markup:
    """A text with the commands between its backticks as code."""
    parts = [escape(units.plain(part)) for part in text.split("`")]
    if len(parts) % 2 == 0:
        return escape(units.plain(text))
    whole = "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
    return Markup(whole)  # noqa: S704 - each part is escaped


def trend(overview: pb.RunOverview) -> str:
    """How the metric of a run in a list changes."""
    return run.trend([(point.round, point.value) for point in overview.points], overview.metric)


def trend_of(committed: Sequence[Round], metric: str) -> str:
    """How a metric of a run's rounds changes."""
    return run.trend([(of.round, of.metrics[metric]) for of in committed if metric in of.metrics], metric)


def told(parts: Iterable[str | Timestamp]) -> str:
    """The parts of a fact as one text."""
    return "".join(units.plain(part) if isinstance(part, str) else moment(part) for part in parts)


_MARGIN = 2
_LEAST_SPAN = 0.05
"""The least span of a picture's values, as a share of the largest value."""


def spark(values: Sequence[float], width: int = 96, height: int = 22) -> Markup:
    """The curve of some values, without text: what stands beside it has the newest one. Empty for fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    low, high = min(finite), max(finite)
    step = (width - 2 * _MARGIN) / (len(finite) - 1)
    # A curve that hardly changes is shown as flat, in the middle.
    span = max(high - low, _LEAST_SPAN * abs(high)) or 1.0
    low = (low + high - span) / 2
    inner = height - 2 * _MARGIN
    points = [
        (_MARGIN + index * step, _MARGIN + inner * (1 - (value - low) / span)) for index, value in enumerate(finite)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    last_x, last_y = points[-1]
    return Markup(  # noqa: S704 - numbers only
        f'<svg class="spark" width="{width}" height="{height}" viewBox="0 0 {width} {height}" aria-hidden="true">'
        f'<polyline points="{line}"/><circle cx="{last_x:.1f}" cy="{last_y:.1f}" r="1.8"/></svg>'
    )
