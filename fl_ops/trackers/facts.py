"""What a tracker gets of a run: its identity and settings once, and the values of each round under fixed names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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


class TrackedRun:
    """One run at one place. By itself a place has no models and no end."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        raise NotImplementedError

    def write(self, round_: RoundFacts) -> int:
        """Write the values that are not there; returns their number."""
        raise NotImplementedError

    def lacks_model(self, name: str, digest: str) -> bool:
        """Whether the place wants the file of this model, such as "best"."""
        del name, digest
        return False

    def add_model(self, path: Path, digest: str) -> None:
        """Keep a model's file, whose stem is its name."""

    def reopen(self) -> None:
        """The run has not ended, even if it had before."""

    def finish(self, end: EndFacts) -> None:
        """The run has ended."""

    def close(self) -> None:
        """Nothing more will be written by this process."""


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
