"""The view of `fl top` in several sizes, its small pictures, and its keys."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from fl_ops.render.text import bar, sparkline
from fl_ops.render.top import Federation, Selection, TopView, keys
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


@pytest.mark.parametrize(
    ("runs", "clients"), slow_except([(0, 0), (2, 3), (100, 1000), (1, 1000), (100, 1)], (0, 0), (100, 1000))
)
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
        "━━────────", "collecting 3/5", "▁▂▃▃▄▅▆▆▇█", "5 min", "digits-0: waiting for 2 more clients",
        "▸  digits-1", "edge-002",
    ):  # fmt: skip
        assert expected in text, f"{expected}\n{text}"


def test_one_quarantined_client_takes_no_column() -> None:
    """At 80 columns all are there, and what waits is whole on several lines."""
    found = federation()
    found.active[
        "digits-0"
    ].waiting_for = "clients with the labels site=depot: 0 of 6 here with the task 'digits' have them"
    found.clients[1].quarantine.until.FromSeconds(1_790_000_000)
    lines = drawn(TopView(found))
    names = next(line for line in lines if "Client" in line)
    assert all(name in names for name in ("State", "Counted", "Failed", "Work", "Came last"))
    assert any("present, quarantined" in line for line in lines)
    assert f"waiting for {found.active['digits-0'].waiting_for}" in " ".join(map(str.strip, lines))


def test_each_client_in_need_is_named() -> None:
    """On a small screen a long reason takes no line of the next client, and says that it goes on."""
    found = federation()
    for name in ("kiel", "lyon", "oslo"):
        need = admin_pb2.Attention(reason="failing", why=f"failed 9 of its newest 20 assignments, {'why ' * 30}")
        found.overview.attention.add(client_id=name, attention=need)
    lines = drawn(TopView(found))
    assert lines[0].startswith("127.0.0.1:7071  needs attention, version 0.1.0")
    assert [sum(line.startswith(f"{name} failed 9") for line in lines) for name in ("kiel", "lyon", "oslo")] == [1] * 3
    assert next(line for line in lines if line.startswith("oslo")).rstrip().endswith("…")


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


def test_small_pictures() -> None:
    """The newest values; close ones are equal bars; values that are not finite are blanks."""
    assert sparkline([5.0, 0.0, 1.0, 0.5], 3) == "▁█▄"
    assert sparkline([1.0, math.nan, 1.0], 3) == "█ █"
    assert sparkline([0.978, 0.975, 0.981], 3) == "███"
    assert (sparkline([], 5), sparkline([math.inf], 5), sparkline([1.0], 0)) == ("", "", "")
    assert (bar(3, 6, 4), bar(9, 6, 4), bar(1, 0, 4)) == ("━━──", "━━━━", "────")


NAMES = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("\x1b[A\x1b[Bq", ["up", "down", "q"]),
        ("\x1b", ["esc"]),
        ("\x1bOB\t\r", ["down", "tab", "enter"]),
        ("\x1b[5~\x1b[6~\x1b[H\x1b[F", ["page up", "page down", "home", "end"]),
        ("xyz", []),
        ("\x1b[15~", []),
    ],
)
def test_keys(typed: str, expected: list[str]) -> None:
    """Arrows of both modes of a terminal; keys without a meaning are left out, and are not taken for esc."""
    assert keys(typed) == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [(["down"], "b"), (["down"] * 5, "c"), (["end", "up"], "b"), (["page down", "home"], "a"), (["up"], "a")],
)
def test_moves(typed: list[str], expected: str) -> None:
    """The first line is chosen at first, and the ends of the list are kept."""
    selection = Selection()
    for key in typed:
        selection = selection.after(key, NAMES, 10)
    assert selection.name == expected


def test_details_and_lists() -> None:
    """Enter opens the chosen line, esc closes it, tab begins the other list, q leaves."""
    opened = Selection(name="b").after("enter", NAMES, 10)
    assert (opened.open, opened.name) == (True, "b")
    assert not opened.after("esc", NAMES, 10).open
    assert opened.after("tab", NAMES, 10) == Selection("clients")
    assert opened.after("q", NAMES, 10).left
    assert not Selection().after("enter", [], 10).open


def test_a_line_that_is_gone() -> None:
    """The first line is chosen; an empty list has none, and no details."""
    assert Selection(name="gone").fitting(NAMES).name == "a"
    assert Selection(name="a", open=True).fitting([]) == Selection()
    assert Selection(name="c").fitting(["x", "c"]).name == "c"
