"""A panel's queries, sent to a Prometheus as Grafana sends them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.monitoring.prometheus import Prometheus

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A series with its name and its values at every step, NaN for missing ones."""

    name: str
    labels: Mapping[str, str]
    points: Sequence[Point]

    @property
    def last(self) -> float | None:
        """The latest existing value."""
        return next((value for _, value in reversed(self.points) if not math.isnan(value)), None)


@dataclass(frozen=True)
class View:
    """A time range of a Prometheus, with the selected values of the dashboard's variables."""

    prometheus: Prometheus
    start: float
    end: float
    step_s: float
    variables: Mapping[str, str]

    def filled(self, text: str) -> str:
        """Replace the variables by their values."""
        return re.sub(r"\$\{?(\w+)\}?", lambda match: self.variables[match[1]], text)

    def lines(self, target: Mapping[str, Any]) -> list[Line]:
        """Return the series of a range query, in the order of their names."""
        found = self.prometheus.query_range(self.filled(target["expr"]), self.start, self.end, self.step_s)
        lines = [Line(_named(target, series.labels), series.labels, self._whole(series.points)) for series in found]
        return sorted(lines, key=lambda line: line.name)

    def rows(self, target: Mapping[str, Any]) -> list[tuple[Mapping[str, str], float]]:
        """Return labels and values of an instant query at the end of the range."""
        found = self.prometheus.query(self.filled(target["expr"]), self.end)
        return [(sample.labels, sample.value) for sample in found]

    def _whole(self, points: Sequence[Point]) -> list[Point]:
        by_step = {round((at - self.start) / self.step_s): value for at, value in points}
        steps = int((self.end - self.start) / self.step_s) + 1
        return [(self.start + step * self.step_s, by_step.get(step, math.nan)) for step in range(steps)]


def _named(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), target["legendFormat"])


@dataclass(frozen=True)
class Look:
    """The style of a field: the panel's defaults with the overrides for its name."""

    field: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.field.get(name)

    def custom(self, name: str, otherwise: Any = None) -> Any:
        """The options for this kind of panel."""
        return self.field.get("custom", {}).get(name, otherwise)


def look_of(panel: Mapping[str, Any], name: str) -> Look:
    """Return the style of a panel's field with this name."""
    config = panel["fieldConfig"]
    field = {**config["defaults"], "custom": dict(config["defaults"].get("custom", {}))}
    for override in config.get("overrides", []):
        if override["matcher"] == {"id": "byName", "options": name}:
            for property_ in override["properties"]:
                id, value = property_["id"], property_.get("value")
                if id.startswith("custom."):
                    field["custom"][id.removeprefix("custom.")] = value
                else:
                    field[id] = value
    return Look(field)


def mapped(look: Look, value: float | str) -> tuple[str, str] | None:
    """Return the word and the colour for a value."""
    key = f"{value:g}" if isinstance(value, float) else value
    for mapping in look["mappings"] or []:
        if key in mapping["options"]:
            return mapping["options"][key]["text"], mapping["options"][key]["color"]
    return None


def by_threshold(look: Look, value: float) -> str:
    """Return the colour of the highest threshold at or below a value."""
    steps = (look["thresholds"] or {}).get("steps", [{"value": None, "color": "text"}])
    return str([step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1])
