"""A panel's queries, asked of a Prometheus as Grafana would ask them."""

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
    """A series by its name, its points at every step, NaN where there is none."""

    name: str
    labels: Mapping[str, str]
    points: Sequence[Point]

    @property
    def last(self) -> float | None:
        """The latest value that there is."""
        return next((value for _, value in reversed(self.points) if not math.isnan(value)), None)


@dataclass(frozen=True)
class View:
    """What is looked at: a time range of a Prometheus, with the dashboard's variables chosen."""

    prometheus: Prometheus
    start: float
    end: float
    step_s: float
    variables: Mapping[str, str]

    def filled(self, text: str) -> str:
        """With the variables' values in their places."""
        return re.sub(r"\$\{?(\w+)\}?", lambda match: self.variables[match[1]], text)

    def lines(self, target: Mapping[str, Any]) -> list[Line]:
        """The series of a range query, in the order of their names."""
        found = self.prometheus.query_range(self.filled(target["expr"]), self.start, self.end, self.step_s)
        lines = [Line(_named(target, each.labels), each.labels, self._whole(each.points)) for each in found]
        return sorted(lines, key=lambda line: line.name)

    def rows(self, target: Mapping[str, Any]) -> list[tuple[Mapping[str, str], float]]:
        """Labels and value of an instant query at the range's end."""
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
    """How a field is shown: the panel's defaults, and what is overridden for its name."""

    field: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.field.get(name)

    def custom(self, name: str, otherwise: Any = None) -> Any:
        """What belongs to this kind of panel."""
        return self.field.get("custom", {}).get(name, otherwise)


def look_of(panel: Mapping[str, Any], name: str) -> Look:
    """The look of a panel's field with this name."""
    config = panel["fieldConfig"]
    field = {**config["defaults"], "custom": dict(config["defaults"].get("custom", {}))}
    for override in config.get("overrides", []):
        if override["matcher"] == {"id": "byName", "options": name}:
            for each in override["properties"]:
                id, value = each["id"], each.get("value")
                if id.startswith("custom."):
                    field["custom"][id.removeprefix("custom.")] = value
                else:
                    field[id] = value
    return Look(field)


def mapped(look: Look, value: float | str) -> tuple[str, str] | None:
    """The word and the colour that stand for a value."""
    key = f"{value:g}" if isinstance(value, float) else value
    for mapping in look["mappings"] or []:
        if key in mapping["options"]:
            return mapping["options"][key]["text"], mapping["options"][key]["color"]
    return None


def by_threshold(look: Look, value: float) -> str:
    """The colour of the highest threshold that a value has reached."""
    steps = (look["thresholds"] or {}).get("steps", [{"value": None, "color": "text"}])
    return str([step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1])
