"""Lines of the log: bounded, folded, and without anything that steers a terminal."""

from __future__ import annotations

import io
import json

import pytest
import structlog

from protos.folding import Folding
from protos.logs import Folder, for_people, processors
from protos.text import MOST_CHARACTERS, escaped, shortened

STEERING = {
    "escape": "\x1b[2J\x1b]0;title\x07",
    "c1": "\x9b31m\x85",
    "carriage-return": "ok\rFAILED",
    "line-feed": "ok\n2026-01-01 [error] forged",
    "bidi": "\u202eexe.txt\u2066",
    "separators": "\u2028\u2029",
    "zero-width": "a\u200bb\u200e",
    "surrogate": "\ud800",
    "nul": "\0",
    "delete": "\x7f",
}


@pytest.mark.parametrize("text", STEERING.values(), ids=STEERING)
def test_what_steers_a_terminal_is_escaped(text):
    """Nothing is left that is not printed as itself; the rest can still be read."""
    assert escaped(f"before {text} after").isprintable()
    assert escaped(f"before {text} after").startswith("before ")
    assert "\\" in escaped(text)


def test_what_is_printed_as_itself_stays():
    """Letters of any script, quotes, and a backslash that was one."""
    text = "Zürich, 東京 'a' \\x1b"
    assert escaped(text) is text
    assert escaped("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_a_long_text_is_cut():
    """With the number of characters that are missing."""
    assert shortened("x" * 5, 5) == "xxxxx"
    assert shortened("x" * 12, 5) == "xxxxx... (7 characters more)"


class Clock:
    """Time that a test moves."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """The folder's time."""
    return Clock()


def test_a_window_lets_some_through_and_counts_the_rest(clock):
    """Each kind has a window of its own; behind its end it is told once what was folded."""
    folding = Folding(2, 60.0)
    assert [folding.passes("a", line, clock.now) for line in range(5)] == [True, True, False, False, False]
    assert folding.passes("b", 0, clock.now)
    assert folding.over(clock.now + 59) == []
    (folded,) = folding.over(clock.now + 60)
    assert (folded.last, folded.count, len(folding)) == (4, 3, 0)
    assert folding.passes("a", 5, clock.now + 60)


def test_too_many_kinds_take_no_more_memory(clock):
    """The oldest window is ended early, and what it folded is not lost."""
    folding = Folding(1, 60.0, kinds=100)
    for number in range(1000):
        folded = folding.over(clock.now)
        assert [each.count for each in folded] == ([1] if number >= 100 else [])
        assert folding.passes(number, "line", clock.now)
        assert not folding.passes(number, "line", clock.now)
    assert len(folding) <= 100


def test_no_limit_folds_nothing(clock):
    """0 lets all through, and keeps nothing."""
    folding = Folding(0, 60.0)
    assert all(folding.passes("a", 0, clock.now) for _ in range(1000))
    assert len(folding) == 0


@pytest.fixture
def written(clock):
    """A log of two lines a minute for each client, as JSON, and what was written there."""
    out = io.StringIO()
    folder = Folder(2, clock, write=lambda event: lines.append(dict(event)))
    lines = []
    logger = structlog.wrap_logger(
        structlog.PrintLogger(out), processors=processors(structlog.processors.JSONRenderer(), folder)
    )
    return logger, folder, lambda: [*map(json.loads, out.getvalue().splitlines()), *lines]


def test_lines_about_one_client_are_folded(written, clock):
    """Others are written all the same; the count comes when the minute is over, though nothing else is logged."""
    log, folder, lines = written
    for number in range(150):
        log.warning("client_failed", client="a", why=str(number))
    log.warning("client_failed", client="b", why="x")
    log.info("client_lost", client="a")
    for _ in range(5):
        log.info("round_committed", run="r")
    assert len(lines()) == 9
    clock.now += 60
    folder.flush()
    (folded,) = [line for line in lines() if "repeated" in line]
    assert (folded["event"], folded["client"], folded["why"], folded["repeated"]) == ("client_failed", "a", "149", 148)


def test_values_are_bounded_and_escaped_wherever_they_are(written):
    """In lists and tables, in keys, in objects that are put into words, and in both forms."""
    log, _, lines = written
    log.info("x", a="y" * 5000, b=["\x1b"], c={"\x1b": "\u202e"}, d=STEERING, e=ValueError("\x1b[2J"))
    (line,) = lines()
    assert len(line["a"]) < MOST_CHARACTERS + 40
    assert (line["b"], line["c"]) == (["\\x1b"], {"\\x1b": "\\u202e"})
    assert all(escaped(text) == line["d"][name] for name, text in STEERING.items())
    assert line["e"] == "ValueError('\\x1b[2J')"


def test_a_pretty_line_is_one_line():
    """With a traceback below it, whose lines stay lines and whose message steers nothing."""
    out = io.StringIO()
    log = structlog.wrap_logger(structlog.PrintLogger(out), processors=processors(for_people(colors=False)))
    log.info("client_failed", why="ok\r\n\x1b[2J\x1b[1;31mforged\u202e")
    assert out.getvalue().count("\n") == 1
    try:
        raise ValueError("\x1b[2J\x1b[Hgone")
    except ValueError as error:
        log.error("rpc_failed", error=repr(error), exc_info=error)
    text = out.getvalue()
    assert not {"\x1b", "\r", "\u202e"} & set(text)
    assert "Traceback" in text
    assert text.count("\n") > 4
