"""What a look at the device found: one line for each thing, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "OK"
    WARN = "WARN"
    """A daemon works, but not as well, or not for long."""
    FAIL = "FAIL"
    """A daemon does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    check: str
    """What was looked at, in one word."""
    said: str
    """What was found; where it is not well, what was expected and what came."""
    mend: str = ""
    """What to do; empty where nothing is to be done, or where `said` says it."""


def ok(check: str, said: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, check, said)


def warn(check: str, said: str, mend: str) -> Finding:
    """It works, but."""
    return Finding(Level.WARN, check, said, mend)


def fail(check: str, said: str, mend: str = "") -> Finding:
    """It does not work."""
    return Finding(Level.FAIL, check, said, mend)


def size(count: float) -> str:
    """Bytes for people: 3.4 MiB."""
    units = ("bytes", "KiB", "MiB", "GiB")
    power = next((power for power in range(len(units)) if count < 1024 ** (power + 1)), len(units) - 1)
    return f"{count / 1024**power:.{1 if power else 0}f} {units[power]}"
