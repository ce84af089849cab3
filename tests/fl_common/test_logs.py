"""Log lines: shortened, limited when they repeat, and without terminal control characters."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from fl_common.logs import MAX_CHARACTERS, RepeatFilter, RepeatLimiter, console_renderer, escaped, processors, shortened

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
def test_terminal_control_is_escaped(text: str) -> None:
    """Only printable characters are left, and the rest can still be read."""
    assert escaped(f"before {text} after").isprintable()
    assert escaped(f"before {text} after").startswith("before ")
    assert "\\" in escaped(text)


def test_printable_text_stays() -> None:
    """Letters of any script, quotes, and a backslash that was one."""
    text = "Zürich, 東京 'a' \\x1b"
    assert escaped(text) is text
    assert escaped("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_a_long_text_is_cut() -> None:
    """The text ends with the number of missing characters."""
    assert shortened("x" * 5, 5) == "xxxxx"
    assert shortened("x" * 12, 5) == "xxxxx... (7 characters more)"


class Clock:
    """A clock that the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The filter's time."""
    return Clock()


def test_a_window_lets_some_through_and_counts_the_rest(clock: Clock) -> None:
    """Each kind has its own window; after its end the suppressed lines are reported once."""
    limiter: RepeatLimiter[str, int] = RepeatLimiter(2, 60.0)
    assert [limiter.allow("a", line, clock.now) for line in range(5)] == [True, True, False, False, False]
    assert limiter.allow("b", 0, clock.now)
    assert limiter.take_ended(clock.now + 59) == []
    (suppressed,) = limiter.take_ended(clock.now + 60)
    assert (suppressed.last, suppressed.count, len(limiter)) == (4, 3, 0)
    assert limiter.allow("a", 5, clock.now + 60)


def test_too_many_kinds_take_no_more_memory(clock: Clock) -> None:
    """The oldest window is ended early, and what it suppressed is not lost."""
    limiter: RepeatLimiter[int, str] = RepeatLimiter(1, 60.0, kinds=100)
    for number in range(1000):
        suppressed = limiter.take_ended(clock.now)
        assert [line.count for line in suppressed] == ([1] if number >= 100 else [])
        assert limiter.allow(number, "line", clock.now)
        assert not limiter.allow(number, "line", clock.now)
    assert len(limiter) <= 100


def test_without_a_limit_all_lines_pass(clock: Clock) -> None:
    """0 lets all through, and keeps nothing."""
    limiter: RepeatLimiter[str, int] = RepeatLimiter(0, 60.0)
    assert all(limiter.allow("a", 0, clock.now) for _ in range(1000))
    assert len(limiter) == 0


Log = tuple[Any, RepeatFilter, Callable[[], list[dict[str, Any]]]]
"""A logger, its filter, and a function that returns all written lines."""


@pytest.fixture
def written(clock: Clock) -> Log:
    """A log of two lines a minute for each client, as JSON, and what was written there."""
    out = io.StringIO()
    repeats = RepeatFilter(2, clock, write=lambda event: lines.append(dict(event)))
    lines: list[dict[str, Any]] = []
    logger = structlog.wrap_logger(
        structlog.PrintLogger(out), processors=processors(structlog.processors.JSONRenderer(), repeats)
    )
    return logger, repeats, lambda: [*map(json.loads, out.getvalue().splitlines()), *lines]


def test_repeated_lines_about_one_client_are_limited(written: Log, clock: Clock) -> None:
    """Other lines are written; the count is written after the minute, even if nothing else is logged."""
    log, repeats, lines = written
    for number in range(150):
        log.warning("client_failed", client="a", why=str(number))
    log.warning("client_failed", client="b", why="x")
    log.info("client_lost", client="a")
    for _ in range(5):
        log.info("round_committed", run="r")
    assert len(lines()) == 9
    clock.now += 60
    repeats.flush()
    (suppressed,) = [line for line in lines() if "repeated" in line]
    assert (suppressed["event"], suppressed["client"], suppressed["why"], suppressed["repeated"]) == (
        "client_failed",
        "a",
        "149",
        148,
    )


def test_values_are_bounded_and_escaped_wherever_they_are(written: Log) -> None:
    """In lists and tables, in keys, in objects that are put into words, and in both forms."""
    log, _, lines = written
    log.info("x", a="y" * 5000, b=["\x1b"], c={"\x1b": "\u202e"}, d=STEERING, e=ValueError("\x1b[2J"))
    (line,) = lines()
    assert len(line["a"]) < MAX_CHARACTERS + 40
    assert (line["b"], line["c"]) == (["\\x1b"], {"\\x1b": "\\u202e"})
    assert all(escaped(text) == line["d"][name] for name, text in STEERING.items())
    assert line["e"] == "ValueError('\\x1b[2J')"


def test_a_pretty_line_is_one_line() -> None:
    """A traceback keeps its lines, and its message contains no control characters."""
    out = io.StringIO()
    log = structlog.wrap_logger(structlog.PrintLogger(out), processors=processors(console_renderer(colors=False)))
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
