"""Windows of local time: over midnight, on weekdays, and in the nights in which clocks are set."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_client.settings.schedule import DAYS, Schedule, parse

ZURICH = ZoneInfo("Europe/Zurich")
HOUR = 3600
ZONES = ["UTC", "Europe/Zurich", "America/St_Johns", "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Casablanca"]

Generated = tuple[str, int, int, set[int]]
"""Text, first minute, last minute or over 1440, and days of a window."""

minutes = st.integers(0, 24 * 60 - 1)
instants = st.integers(
    int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()), int(datetime(2027, 1, 1, tzinfo=UTC).timestamp())
)


@st.composite
def windows(draw: st.DrawFn) -> Generated:
    """(text, first minute, last minute or over 1440, days) of a window, over midnight or not."""
    start, end = draw(minutes), draw(st.integers(0, 24 * 60).filter(bool))
    if start == end:
        end = start % (24 * 60) + 1
    days = draw(st.sets(st.sampled_from(DAYS), min_size=1))
    text = f"{','.join(sorted(days))} {start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
    return text, start, end + (24 * 60 if end < start else 0), {DAYS.index(day) for day in days}


def at(text: str, zone: tzinfo | None = ZURICH, fold: int = 0) -> float:
    """Unix seconds of a local time."""
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def open_minutes(schedule: Schedule, start: float, end: float) -> int:
    """Number of open minutes in a period."""
    return sum(schedule.open_at(when) for when in range(int(start), int(end), 60))


@pytest.mark.parametrize(
    ("window", "when", "expected"),
    [
        ("22:00-06:00", "2026-11-20 22:00", True),
        ("22:00-06:00", "2026-11-20 21:59:59", False),
        ("22:00-06:00", "2026-11-21 05:59:59", True),
        ("22:00-06:00", "2026-11-21 06:00", False),
        ("fri 22:00-06:00", "2026-11-21 03:00", True),
        ("fri 22:00-06:00", "2026-11-20 03:00", False),
        ("sun 22:00-06:00", "2026-11-23 03:00", True),
        ("mon-fri 09:00-17:00", "2026-11-21 12:00", False),
        ("sat,sun 00:00-24:00", "2026-11-21 23:59:59", True),
        ("sat,sun 00:00-24:00", "2026-11-23 00:00", False),
        ("fri-mon 12:00-13:00", "2026-11-23 12:30", True),
        ("fri-mon 12:00-13:00", "2026-11-24 12:30", False),
        ("Sat 08:00 - 09:00", "2026-11-21 08:00", True),
        ("18:30-00:00", "2026-11-21 23:59", True),
    ],
)
def test_a_window_is_open_by_local_time(window: str, when: str, expected: bool) -> None:
    """The window includes its first minute and excludes its end. 2026-11-20 is a Friday."""
    assert Schedule([window], ZURICH).open_at(at(when)) is expected


def test_several_windows_are_open_while_one_is() -> None:
    """Two windows at noon and in the evening are open, and closed between them."""
    schedule = Schedule(["12:00-13:00", "18:00-20:00"], ZURICH)
    assert [schedule.open_at(at(f"2026-11-20 {hour}:30")) for hour in (12, 15, 19)] == [True, False, True]


def test_a_night_is_an_hour_shorter_in_spring_and_longer_in_autumn() -> None:
    """22:00 to 06:00 are 8 hours; on 29 March 2026 the clock skips one, and on 25 October it shows one twice."""
    schedule = Schedule(["22:00-06:00"], ZURICH)
    for evening, hours in (("2026-03-28", 7), ("2026-10-24", 9), ("2026-11-20", 8)):
        opens = at(f"{evening} 22:00")
        assert schedule.next_change(opens) == opens + hours * HOUR


def test_an_hour_that_the_clock_skips_opens_nothing() -> None:
    """At 02:00 on 29 March 2026 it becomes 03:00: what lies inside is not that day, what begins inside is shorter."""
    inside, across = Schedule(["02:15-02:45"], ZURICH), Schedule(["02:30-04:00"], ZURICH)
    midnight = at("2026-03-29 00:00")
    assert inside.next_change(midnight) == at("2026-03-30 02:15")
    assert across.next_change(midnight) == at("2026-03-29 03:00")
    assert across.next_change(at("2026-03-29 03:00")) == at("2026-03-29 04:00")


def test_an_hour_that_the_clock_shows_twice_is_open_twice() -> None:
    """On 25 October 2026 it is 02:10 two times, an hour apart; between them, at 02:40, it is closed."""
    schedule = Schedule(["02:00-02:30"], ZURICH)
    first, second = at("2026-10-25 02:00"), at("2026-10-25 02:00", fold=1)
    assert second - first == HOUR
    assert schedule.next_change(first) == first + HOUR / 2
    assert schedule.next_change(first + HOUR / 2) == second


def test_what_is_always_open_never_changes() -> None:
    """All seven days, all day."""
    assert Schedule(["00:00-24:00"], ZURICH).next_change(at("2026-03-28 12:00")) is None


def test_the_devices_own_zone_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a named zone the C library's zone applies, with its own changes in spring."""
    monkeypatch.setenv("TZ", "Europe/Zurich")
    time.tzset()
    try:
        opens = at("2026-03-28 22:00")
        schedule = Schedule(["22:00-06:00"])
        assert (schedule.open_at(opens), schedule.next_change(opens)) == (True, opens + 7 * HOUR)
    finally:
        monkeypatch.undo()
        time.tzset()


@given(windows(), instants, st.sampled_from(ZONES))
def test_a_window_is_midnight_plus_minutes(window: Generated, when: int, zone: str) -> None:
    """Compared with another computation: a day's midnight plus minutes, on clocks without changes."""
    text, start, end, days = window
    wall = datetime.fromtimestamp(when, ZoneInfo(zone)).replace(tzinfo=None)
    midnights = [datetime.combine(wall - timedelta(days=back), datetime.min.time()) for back in (0, 1)]
    expected = any(
        midnight.weekday() in days and midnight + timedelta(minutes=start) <= wall < midnight + timedelta(minutes=end)
        for midnight in midnights
    )
    assert Schedule([text], ZoneInfo(zone)).open_at(when) is expected


@settings(max_examples=25)
@given(st.lists(windows(), min_size=1, max_size=3), instants, st.sampled_from(ZONES), st.floats(0, 1))
def test_the_next_change_is_the_first(several: list[Generated], when: int, zone: str, share: float) -> None:
    """The state changes at that second and not before."""
    schedule = Schedule([text for text, *_ in several], ZoneInfo(zone))
    now, change = schedule.open_at(when), schedule.next_change(when)
    if change is None:
        week = range(when, when + 7 * 24 * HOUR, 7 * 60)
        assert {schedule.open_at(moment) for moment in week} == {now}
        return
    assert when < change
    assert schedule.open_at(change) != now
    assert schedule.open_at(change - 1) is schedule.open_at(when + share * (change - 1 - when)) is now


@settings(max_examples=8)
@given(st.lists(windows(), min_size=1, max_size=3))
def test_a_week_without_a_change_of_clocks_has_each_window_once(several: list[Generated]) -> None:
    """The minutes of a week in UTC, counted one by one, are those of the union of the windows."""
    week = {
        (day * 1440 + minute) % (7 * 1440) for _, start, end, days in several for day in days
        for minute in range(start, end)
    }  # fmt: skip
    monday = at("2026-06-01 00:00", UTC)
    assert open_minutes(Schedule([text for text, *_ in several], UTC), monday, monday + 7 * 24 * HOUR) == len(week)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("22-6", 'expected a window such as "22:00-06:00"'),
        ("", 'expected a window such as "22:00-06:00"'),
        ("22:00-06:60", "expected times from 00:00 to 24:00, got 06:60"),
        ("22:00-24:01", "expected times from 00:00 to 24:00, got 24:01"),
        ("24:00-06:00", "expected a window that begins before it ends"),
        ("06:00-06:00", 'a whole day is "00:00-24:00"'),
        ("monday 06:00-07:00", "expected days among mon, tue"),
        ("mon-fry 06:00-07:00", "got 'mon-fry'"),
        ("mon,,tue 06:00-07:00", "got ''"),
    ],
)
def test_an_invalid_window_is_reported(text: str, words: str) -> None:
    """The message has the expected and the actual value."""
    with pytest.raises(ValueError, match="expected") as caught:
        parse(text)
    assert words in str(caught.value)
