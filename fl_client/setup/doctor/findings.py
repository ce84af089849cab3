"""The result of a check: its level, what was found, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding."""

    OK = "OK"
    WARN = "WARN"
    """A daemon works, but slowly, or not for long."""
    FAIL = "FAIL"
    """A daemon does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    level: Level
    check: str
    """Name of the check."""
    message: str
    """What was found. For a warning or a failure: what was expected, and what was found."""
    fix: str = ""
    """What to do. Empty where there is nothing to do, or where the message has it."""


def ok(check: str, message: str) -> Finding:
    """A check that passed."""
    return Finding(Level.OK, check, message)


def warn(check: str, message: str, fix: str) -> Finding:
    """A check with a warning."""
    return Finding(Level.WARN, check, message, fix)


def fail(check: str, message: str, fix: str = "") -> Finding:
    """A check that failed."""
    return Finding(Level.FAIL, check, message, fix)
