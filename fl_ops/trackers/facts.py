"""What a tracker gets of a run: its identity and settings once, and the values of each round under fixed names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_server.rounds.client_metrics import by_clients
from fl_server.rounds.directions import PREFIX


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


@dataclass
class RoundValues:
    """Collects the values of a round. The first part of a name is the group in which TensorBoard shows it."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, group: str, values: Mapping[str, float | None]) -> None:
        """Add the values that are known."""
        known = {name: value for name, value in sorted(values.items()) if value is not None}  # maps have no order
        self.values.update({f"{group}/{name}": float(value) for name, value in known.items()})

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """The server's evaluation as evaluation/accuracy, the clients' as clients/accuracy_mean."""
        self.add("evaluation", {name: value for name, value in metrics.items() if not by_clients(name)})
        self.add("clients", {name.removeprefix(PREFIX): value for name, value in metrics.items() if by_clients(name)})

    def add_epochs(self, epochs: Iterable[Mapping[str, float]]) -> None:
        """The last value of each metric that clients measured in their local epochs."""
        last: dict[str, float] = {}
        for epoch in epochs:
            last.update(epoch)
        self.add("training", {f"last_epoch_{name}": value for name, value in last.items()})


def dotted(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as one level: {"stop": {"rounds": 3}} as {"stop.rounds": "3"}. Unset ones are left out."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(dotted(value, f"{before}{name}."))
        elif value not in (None, "", [], ()):
            found[f"{before}{name}"] = _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:  # numbers of a Struct are all floats
        value = int(value)
    return str(value)
