"""What a tracker gets of a run: its identity and settings once, and the values of each round under fixed names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunFacts:
    """A run, as it is known before its first round.

    name: of its folder and of its entry; unique among the runs that are tracked at one place.
    identity: differs for two runs that have the same name by chance.
    settings: by dotted names, such as algorithm.parameters.alpha.
    began: seconds since 1970, if known.
    """

    name: str
    identity: str
    settings: Mapping[str, str]
    began: float | None = None


@dataclass(frozen=True)
class RoundFacts:
    """The values of a round that are known so far. time: seconds since 1970, of the commit."""

    round: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class EndFacts:
    """How a run ended. state: "completed", "stopped", "failed" or "interrupted". time: seconds since 1970."""

    state: str
    reason: str
    time: float


def dotted(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as one level: {"stop": {"rounds": 3}} as {"stop.rounds": "3"}. Unset ones are left out."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(dotted(value, f"{before}{name}."))
        elif value not in (None, "", [], ()):
            flat[f"{before}{name}"] = _text(value)
    return flat


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:  # numbers of a Struct are all floats
        value = int(value)
    return str(value)
