"""Committed rounds for tests of values."""

from __future__ import annotations

from typing import Any

from fl_web.facts.rounds import Round


def committed(number: int, **values: Any) -> Round:
    """A round that took a second, of a run that was created at 100."""
    fields: dict[str, Any] = {
        "round": number, "committed": 101.0 + number, "seconds": 1.0, "attempts": 1, "accepted": 2, "dropped": 0,
        "training_loss": None, "metrics": {}, "down": 10, "up": 5, "total_down": 10 * (number + 1),
        "total_up": 5 * (number + 1), "norms": {}, "cosine": None, "phases": {}, "refused": {}, "assignments": {},
        "late": 0, "digest": "", "averaged_digest": "",
    }  # fmt: skip
    return Round(**{**fields, **values})
