"""The pictures of the dashboards: numbers as Grafana writes them, queries as it asks them, every panel drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from docs.source.dashboards import federation
from docs.source.dashboards.asking import View, by_threshold, look_of, mapped
from docs.source.dashboards.marks import marks_of
from docs.source.dashboards.page import draw
from docs.source.dashboards.units import on_axis, written
from k8s.dashboards.files import committed
from tests.marks import slow_except
from tests.monitoring.prometheus import Sample, Series

LABELS = {
    "run": "digits",
    "state": "running",
    "outcome": "committed",
    "phase": "collecting",
    "le": "1.0",
    "algorithm": "fedcm",
    "task": "digits",
}


@pytest.mark.parametrize(
    ("value", "unit", "decimals", "text"),
    [
        (0.934, "percentunit", 1, "93.4%"),
        (0.0312, "percentunit", None, "3.12%"),
        (0, "percentunit", None, "0%"),
        (0.25, "s", None, "250 ms"),
        (90, "s", None, "1.50 mins"),
        (30 * 86400, "s", None, "4.29 weeks"),
        (1536, "bytes", None, "1.50 KiB"),
        (2_000_000, "Bps", None, "2 MB/s"),
        (8, "none", None, "8"),
        (0.1234, "none", 3, "0.123"),
        (math.nan, "none", None, "NaN"),
    ],
)
def test_a_number_is_written_with_its_unit(value: float, unit: str, decimals: int, text: str) -> None:
    """With the decimals that were asked for, or as many as say something."""
    assert written(value, unit, decimals) == text


def test_an_unknown_unit_is_an_error() -> None:
    """A picture must not show a number as something that it is not."""
    with pytest.raises(ValueError, match="expected a unit that is known here, got 'furlongs'"):
        written(1, "furlongs")


class Fake:
    """A Prometheus that has one series of a shape for everything, and remembers what it was asked."""

    def __init__(self, value: float = 0.5, has: Any = lambda at: True) -> None:
        self.value, self.has = value, has
        self.asked: list[str] = []

    def query_range(self, expression: str, start: float, end: float, step_s: float) -> list[Series]:
        self.asked.append(expression)
        steps = int((end - start) / step_s) + 1
        times = [start + number * step_s for number in range(steps)]
        return [Series(LABELS, tuple((at, self.value) for at in times if self.has(at)))]

    def query(self, expression: str, at: float) -> list[Sample]:
        self.asked.append(expression)
        return [Sample(LABELS, self.value)]


def view(prometheus: Any, start: float = 1000.0, end: float = 1100.0) -> View:
    """A range of ten steps."""
    return View(prometheus, start, end, 10.0, {"run": "digits", "window": "30s", "datasource": "Prometheus"})


def test_a_gap_in_a_series_stays_a_gap() -> None:
    """Grafana draws no line where a scrape is missing, and neither may a picture."""
    (line,) = view(Fake(has=lambda at: at != 1050)).lines({"expr": "up", "legendFormat": "{{run}}"})
    assert line.name == "digits"
    assert [at for at, value in line.points if math.isnan(value)] == [1050]
    assert len(line.points) == 11


def test_an_override_is_stronger_than_a_panels_default() -> None:
    """By the name of the series, and only for it."""
    override = {"matcher": {"id": "byName", "options": "a"}, "properties": [{"id": "custom.lineWidth", "value": 0}]}
    panel = {"fieldConfig": {"defaults": {"unit": "s", "custom": {"lineWidth": 2}}, "overrides": [override]}}
    assert [look_of(panel, name).custom("lineWidth") for name in "ab"] == [0, 2]


def test_a_value_has_the_colour_of_the_highest_threshold_that_it_reached() -> None:
    """The first step has no value: it is where it begins."""
    steps = [{"value": None, "color": "green"}, {"value": 1, "color": "orange"}, {"value": 3, "color": "red"}]
    look = look_of({"fieldConfig": {"defaults": {"thresholds": {"steps": steps}}}}, "")
    assert [by_threshold(look, value) for value in (0.9, 1, 7)] == ["green", "orange", "red"]


def test_a_value_mapping_replaces_a_number() -> None:
    """2.0 is the key "2" of a mapping."""
    options = {"2": {"text": "Down", "color": "red"}}
    look = look_of({"fieldConfig": {"defaults": {"mappings": [{"type": "value", "options": options}]}}}, "")
    assert (mapped(look, 2.0), mapped(look, 1.0)) == (("Down", "red"), None)


def annotation(**changes: Any) -> dict[str, Any]:
    """A dashboard with one annotation."""
    shown = {"expr": "x", "enable": True, "iconColor": "red", "step": "10s", "useValueForTime": False, **changes}
    return {"annotations": {"list": [shown]}}


def test_marks_a_step_apart_are_one_region() -> None:
    """From 1000 to 1020 and at 1060, of values over 0 at these times."""
    found = marks_of(annotation(), view(Fake(has=lambda at: at <= 1020 or at == 1060)))
    assert [(mark.start, mark.end) for mark in found] == [(1000, 1020), (1060, 1060)]


def test_a_mark_is_drawn_at_its_value() -> None:
    """A value is in milliseconds; one before the range is not drawn, and neither is what is switched off."""
    assert [mark.start for mark in marks_of(annotation(useValueForTime=True), view(Fake(1_042_000)))] == [1042]
    assert marks_of(annotation(useValueForTime=True), view(Fake(999_000))) == []
    assert marks_of(annotation(enable=False), view(Fake())) == []


@pytest.mark.slow
@pytest.mark.parametrize("uid", slow_except(committed(), "impetus-run"))
def test_every_panel_is_drawn(uid: str, tmp_path: Path) -> None:
    """Every query is asked, with a value in the place of each variable, and the picture has the grid's shape."""
    fake, model = Fake(), committed()[uid]
    draw(model, view(fake), tmp_path / "it.png", "a caption")
    assert len(fake.asked) >= sum(len(panel.get("targets", [])) for panel in model["panels"])
    assert not [text for text in fake.asked if "$" in text]
    with Image.open(tmp_path / "it.png") as picture:
        lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in model["panels"])
        assert picture.height / picture.width == pytest.approx((84 + 38 * lines + 44) / 1400, abs=0.01)


@pytest.mark.parametrize(
    ("value", "unit", "text"), [(60, "s", "1 min"), (90, "s", "1.5 mins"), (1, "s", "1 s"), (0.5, "percentunit", "50%")]
)
def test_a_tick_is_as_short_as_it_can_be(value: float, unit: str, text: str) -> None:
    """Without the zeros that a number of fixed length has."""
    assert on_axis(value, unit) == text


class Fleet:
    """Records the scenario's actions: kills and restarts of processes, files of faults."""

    began = 0.0

    def __init__(self) -> None:
        self.server = self
        self.broken: set[str] = set()
        self.daemons = [Part(self, f"edge-{index}") for index in range(federation.DAEMONS)]

    def fault(self, index: int, name: str) -> Any:
        return Part(self, f"{name}-{index}")

    def kill(self) -> None:
        self.broken.add("server")

    def serve(self) -> None:
        self.broken.remove("server")


class Part:
    """A part that can be broken and repaired."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name

    def touch(self) -> None:
        self._fleet.broken.add(self._name)

    def unlink(self) -> None:
        self._fleet.broken.remove(self._name)

    kill, start = touch, unlink


def test_the_scenario_repairs_every_fault() -> None:
    """Every fault is undone: the pictures show a federation that recovers."""
    fleet: Any = Fleet()
    seen: set[str] = set()
    for _, words, happen in federation.STORY:
        if "run" not in words:
            happen(fleet)
        seen |= fleet.broken
    assert (len(seen), fleet.broken) == (5, set())
