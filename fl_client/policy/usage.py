"""The work of the current day, counted on disk: it survives a restart and SIGKILL.

A day ends at local midnight. While the clock shows an earlier day than the file, as on a board without a battery after
each start, the counts stay: a wrong clock must not start a new budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import date, datetime, time, timedelta, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import structlog

from fl_client.errors import StateError
from fl_common.atomic_files import atomic_writer

log = structlog.get_logger()

FILE = "usage.json"
"""Name of the file in the state directory."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts of work. In the file they are those of one day."""

    assignments: int = 0
    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(**{name: getattr(self, name) + getattr(other, name) for name in NAMES})


NAMES = tuple(each.name for each in fields(Amounts))


class DailyUsage:
    """The counts of one day. Not thread-safe; `write` alone may run on another thread."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Read the file, if there is one. clock: Unix seconds. Raises StateError for a file that is not this one's."""
        self._path, self._clock = path, clock
        self._zone: tzinfo | None = None
        self._day, self.used = _read(path)
        self._warned = False

    def set_zone(self, name: str) -> None:
        """Days are those of this time zone. "": the device's own."""
        self._zone = ZoneInfo(name) if name else None

    def roll(self) -> bool:
        """Start a new day if there is one. Returns whether the counts began again."""
        today = self._today()
        if self._day is None or today > self._day:
            began, self._day, self.used = self._day is not None, today, Amounts()
            return began
        if today < self._day and not self._warned:
            self._warned = True
            log.warning(
                "clock_behind", counts_of=str(self._day), today=str(today),
                todo=f"set the clock; if the counts are of a wrong day, end the daemon and remove {self._path}",
            )  # fmt: skip
        return False

    def add(self, amounts: Amounts) -> None:
        """Count work in memory."""
        self.roll()
        self.used += amounts

    def content(self) -> bytes:
        """The file's content as it should be now."""
        return json.dumps({"day": str(self._day or self._today()), **asdict(self.used)}).encode()

    def write(self, content: bytes, *, durable: bool = False) -> None:
        """Write the file; blocking. durable: it survives a power cut too. Raises OSError."""
        with atomic_writer(self._path, part=self._path.with_suffix(".part"), durable=durable) as file:
            file.write(content)

    def midnight(self) -> float:
        """Unix seconds of the day's end."""
        tomorrow = self._today() + timedelta(days=1)
        return datetime.combine(tomorrow, time(), self._zone).astimezone().timestamp()

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock(), self._zone).date()


def _read(path: Path) -> tuple[date | None, Amounts]:
    try:
        content = json.loads(path.read_bytes())
        day = date.fromisoformat(content.pop("day"))
        used = Amounts(**content)
        if not all(_is_amount(getattr(used, name)) for name in NAMES):
            raise ValueError("an amount is no number of 0 or more")
    except FileNotFoundError:
        return None, Amounts()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path}: expected the day's counts that this daemon wrote, got {error}; remove the file to count from 0"
        ) from None
    return day, used


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
