"""The ids that clients and runs may have, and versions of our software in order."""

from __future__ import annotations

import re

ID_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
"""Ids are used as file names. None starts with a dot or a dash, so none is ".." or a command-line option."""


def check_id(kind: str, value: str) -> str:
    """Return `value` if it is a valid id.

    Args:
        kind: what it names, for the message: "client id", "run id".
        value: the proposed id.

    Raises:
        ValueError: it is not 1 to 64 letters, digits, dots, dashes and underscores, or starts with a dot or a dash.
    """
    if ID_PATTERN.fullmatch(value) is None:
        raise ValueError(
            f"{kind}: expected 1 to 64 of A-Z a-z 0-9 . _ - that do not start with . or -, got {value[:80]!r}"
        )
    return value


VERSION_PATTERN = re.compile(r"\d{1,6}(\.\d{1,6}){0,2}")
"""A version as a setting names it: 1, 1.2 or 1.2.3."""
_OURS = "impetus "


def version_of(software: str) -> tuple[int, int, int]:
    """The version in the name that a daemon gives itself, "impetus 0.1.0"; zeros for another name or none.

    What follows the numbers, as of a release candidate, does not count.
    """
    found = VERSION_PATTERN.match(software.removeprefix(_OURS)) if software.startswith(_OURS) else None
    numbers = [int(number) for number in found[0].split(".")] if found else []
    major, minor, patch, *_ = (*numbers, 0, 0, 0)
    return major, minor, patch
