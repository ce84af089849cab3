"""The view of `fl top` in several sizes, and its small pictures."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from fl_ops.render.sparkline import bar, sparkline
from fl_ops.render.top.selection import Selection
from fl_ops.render.top.view import Federation, TopView, time_left
from protos.fl.v1 import admin_pb2
from tests.marks import slow_except


def at(seconds: int) -> Timestamp:
    """A time."""
    return Timestamp(seconds=seconds)


def run(name: str, **more: Any) -> admin_pb2.RunOverview:
    """A run with ten of forty rounds in 100 s."""
    values: dict[str, Any] = {
        "state": admin_pb2.RUN_STATE_RUNNING, "rounds_done": 10, "rounds_planned": 40, "phase": "collecting",
        "cohort_size": 5, "admitted": 3, "created": at(1000), "latest_commit": at(1100), "metric": "accuracy",
        "best": 0.875, **more,
    }  # fmt: skip
    points = [admin_pb2.MetricPoint(round=number, value=number / 10) for number in range(10)]
    return admin_pb2.RunOverview(run_id=name, points=points, **values)


def federation(runs: int = 2, clients: int = 3) -> Federation:
    """So many runs and clients; the first run waits."""
    overview = admin_pb2.GetOverviewResponse(
        runs=[run(f"digits-{number}") for number in range(runs)],
        runs_by_state={"running": runs, "failed": 1}, clients_by_state={"present": clients, "banned": 1},
        version="0.1.0", now=at(1110),
    )  # fmt: skip
    present = [
        admin_pb2.ClientStatus(client_id=f"edge-{number:03d}", state=admin_pb2.CLIENT_STATE_PRESENT)
        for number in range(clients)
    ]
    waiting = admin_pb2.RunStatus(run_id="digits-0", waiting_for="2 more clients with its task")
    return Federation("127.0.0.1:7071", overview, present, {"digits-0": waiting})


def drawn(view: TopView, width: int = 80, height: int = 24) -> list[str]:
    """The lines on a screen of this size."""
    text = io.StringIO()
    console = Console(file=text, width=width, height=height, force_terminal=True, color_system=None)
    with console.screen(hide_cursor=False):
        pass
    text.truncate(0)
    text.seek(0)
    console.print(view, end="")
    return text.getvalue().splitlines()


@pytest.mark.parametrize(("runs", "clients"), [(0, 0), (2, 3), (100, 1000), (1, 1000), (100, 1)])
@pytest.mark.parametrize(("width", "height"), slow_except([(80, 24), (60, 12), (200, 50)], (60, 12)))
def test_it_fits_the_screen(runs: int, clients: int, width: int, height: int) -> None:
    """Every line is within the width, and there are exactly as many as the screen has."""
    lines = drawn(TopView(federation(runs, clients), Selection().fitting([])), width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert "leave" in lines[-1]


def test_what_it_shows() -> None:
    """Health, counts, runs with progress and time left, what waits, clients."""
    text = "\n".join(drawn(TopView(federation(), Selection(name="digits-1")), 100))
    for expected in (
        "healthy, version 0.1.0", "runs  2 running, 1 failed", "clients  3 present, 1 banned", "10 of 40", "87.50 %",
        "━━────────", "collecting 3/5", "▁▂▃▃▄▅▆▆▇█", "4 min 50 s", "digits-0: waiting for 2 more clients",
        "▸  digits-1", "edge-002",
    ):  # fmt: skip
        assert expected in text, f"{expected}\n{text}"


@pytest.mark.parametrize("name", ["digits-00", "digits-50", "digits-99"])
def test_the_chosen_line_is_visible(name: str) -> None:
    """The list moves with the selection."""
    found = federation()
    found.overview.ClearField("runs")
    found.overview.runs.extend(run(f"digits-{number:02d}") for number in range(100))
    assert f"▸  {name}" in "\n".join(drawn(TopView(found, Selection(name=name))))


def test_without_a_connection() -> None:
    """The last state stays, and the reason is shown in place of the health."""
    first = drawn(TopView(federation(), lost="no connection: refused"))[0]
    assert "no connection: refused" in first
    assert "healthy" not in first


def test_the_whole_view() -> None:
    """For a file every line is there, without a marker and without keys."""
    lines = drawn(TopView(federation(50, 60), whole=True))
    assert "\n".join(lines).count("edge-") == 60
    assert not [line for line in lines if "▸" in line or "leave" in line]


@pytest.mark.parametrize("more", [{"ended": at(1)}, {"rounds_done": 0}, {"rounds_planned": 0}])
def test_a_time_that_nobody_can_know(more: dict[str, Any]) -> None:
    """An ended run, one without a round, one whose rounds are unknown."""
    assert time_left(run("a", **more), federation().overview) == ""


def test_small_pictures() -> None:
    """The newest values; close ones are equal bars; values that are not finite are blanks."""
    assert sparkline([5.0, 0.0, 1.0, 0.5], 3) == "▁█▄"
    assert sparkline([1.0, math.nan, 1.0], 3) == "█ █"
    assert sparkline([0.978, 0.975, 0.981], 3) == "███"
    assert (sparkline([], 5), sparkline([math.inf], 5), sparkline([1.0], 0)) == ("", "", "")
    assert (bar(3, 6, 4), bar(9, 6, 4), bar(1, 0, 4)) == ("━━──", "━━━━", "────")
