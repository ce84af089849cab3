"""Windows of local time: "22:00-06:00", "mon-fri 18:30-24:00", "sat,sun 00:00-24:00".

Local clock time counts. An hour that the clock skips in spring is part of no window, and an hour that it repeats in
autumn is part of a window both times. A window over midnight belongs to the day it begins on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MINUTES = 24 * 60
_HORIZON = 8 * _MINUTES
"""A week, and a day for clock changes. A schedule without a change in this time never changes."""
_FORM = re.compile(r"(?:(?P<days>[a-z,\- ]+) )?(\d\d):(\d\d) ?- ?(\d\d):(\d\d)")


@dataclass(frozen=True, slots=True)
class Window:
    """One window. Minutes count from midnight of its first day. `end` is over 1440 where it ends on the next day."""

    days: frozenset[int]
    """Days on which it begins, 0 for Monday."""
    start: int
    end: int
    text: str
    """The window as the settings have it."""

    def holds(self, day: int, minute: int) -> bool:
        """Whether it is open in this minute of this weekday."""
        today = day in self.days and self.start <= minute < self.end
        return today or ((day - 1) % 7 in self.days and minute + _MINUTES < self.end)


def parse(text: str) -> Window:
    """Parse a window of the settings. Raises ValueError that names the expected form."""
    form = _FORM.fullmatch(text.strip().lower())
    if form is None:
        raise ValueError(f'expected a window such as "22:00-06:00" or "mon-fri 18:30-24:00", got {text!r}')
    days = form["days"]
    start, end = _minute(form[2], form[3], text), _minute(form[4], form[5], text)
    if start in (_MINUTES, end):
        raise ValueError(f'expected a window that begins before it ends, got {text!r}: a whole day is "00:00-24:00"')
    end += _MINUTES if end < start else 0
    return Window(frozenset(range(7)) if days is None else _days(days, text), start, end, text)


def _minute(hour: str, minute: str, text: str) -> int:
    total = 60 * int(hour) + int(minute)
    if int(minute) > 59 or total > _MINUTES:
        raise ValueError(f"expected times from 00:00 to 24:00, got {hour}:{minute} in {text!r}")
    return total


def _days(names: str, text: str) -> frozenset[int]:
    days: set[int] = set()
    for part in names.split(","):
        first, _, last = (name.strip() for name in part.partition("-"))
        if first not in DAYS or (last or first) not in DAYS:
            raise ValueError(
                f"expected days among {', '.join(DAYS)}, such as mon-fri or sat,sun, got {part!r} in {text!r}"
            )
        begin, end = DAYS.index(first), DAYS.index(last or first)
        days |= {day % 7 for day in range(begin, (end if end >= begin else end + 7) + 1)}
    return frozenset(days)


class Schedule:
    """Several windows in one time zone. It is open while any of them is open. Times are Unix seconds."""

    def __init__(self, windows: Sequence[str], zone: tzinfo | None = None) -> None:
        """zone: None for the device's own. Raises ValueError."""
        self.windows = tuple(parse(window) for window in windows)
        self._zone = zone

    def open_at(self, when: float) -> bool:
        """Whether a window is open at that time."""
        local = datetime.fromtimestamp(when, self._zone)
        day, minute = local.weekday(), 60 * local.hour + local.minute
        return any(window.holds(day, minute) for window in self.windows)

    def next_change(self, when: float) -> float | None:
        """Time of the next change. None if there is none.

        Windows and clocks change on whole minutes, so a check of each minute needs no rule about offsets.
        """
        now, minute = self.open_at(when), when // 60 * 60
        later = (minute + 60 * step for step in range(1, _HORIZON + 1))
        return next((moment for moment in later if self.open_at(moment) != now), None)
