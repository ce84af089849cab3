"""Keys of `fl top`."""

from __future__ import annotations

import pytest

from fl_ops.render.top.selection import Selection, keys

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
