"""The ids that clients and runs may have."""

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
