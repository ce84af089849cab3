"""The checks of a life that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.deterministic.life import Life


def check(life: Life) -> None:
    """Check everything that must hold at the end of a life. Raises AssertionError."""
