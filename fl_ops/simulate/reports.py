"""What a simulation reports while it runs: committed rounds, steps of work, failures, and where its time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Literal, TypeVar

from fl_server.admission.client_rules import Epochs


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A committed round."""

    round: int
    accepted: tuple[str, ...]
    """Clients whose updates are in the model, in the order of id bytes; with a buffer, in that of their arrival."""
    dropped: int
    """Number of clients that were drawn but not accepted; with a buffer, that delivered nothing since the last step."""
    attempts: int
    """Number of draws."""
    training_loss: float | None
    """Mean over the accepted clients of their mean loss over local steps."""
    metrics: Mapping[str, float]
    """Metrics of the server's and the clients' evaluations; empty if none was due."""
    bytes_down: int
    """Tensor bytes that a networked run would have transferred since the previous round."""
    bytes_up: int
    seconds: float
    """Time of local training, server step and evaluation together."""
    digest: str | None
    """Digest of the model after the round, as in a coordinator's ledger. None: it was not taken."""
    local_epochs: Epochs = ()
    """Means over the accepted clients' examples of what they measured in each local epoch; empty if they did not."""
    simulated_s: float | None = None
    """Simulated time since the previous round: on the clients' devices. None without [simulation.system]."""
    simulated_total_s: float | None = None
    """Simulated time since the start of the run."""
    why_short: str = ""
    """Why the round has fewer updates than it wants, as a coordinator says it; empty if it has all."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the run measured beyond its evaluations; empty if nothing was due. Its time is not in `seconds`."""
    versions: tuple[int, ...] = ()
    """With a buffer: the round whose model each accepted update began from."""

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values; `measured` and `versions` only if there are any."""
        return {name: value for name, value in asdict(self).items() if name not in _IF_ANY or value}


_IF_ANY = ("measured", "versions")


@dataclass(frozen=True, slots=True)
class Step:
    """The work that a simulation begins, for a display of its progress."""

    round: int
    work: str
    """"client" or "evaluation"."""
    number: int = 1
    """The number of the client in its round, from 1."""
    of: int = 1
    """Clients that were drawn for the round so far."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A client that delivered no update."""

    round: int
    client: str
    why: str
    trace: str = ""
    """The traceback of the task's own code, if that code raised an error."""

    def __str__(self) -> str:
        return f"round {self.round}, {self.client}: {self.why}"


Part = Literal["clients", "admission", "aggregation", "bundles", "evaluation", "evaluation on clients"]
PARTS: Mapping[Part, str] = {
    "clients": "waiting for clients' updates",
    "admission": "checks of updates",
    "aggregation": "sums and server step",
    "bundles": "packing of model and direction",
    "evaluation": "evaluation of the model",
    "evaluation on clients": "waiting for clients' evaluations",
}
OTHER = "other work of the rounds"

T = TypeVar("T")


class Profile:
    """Seconds of each part, in the process that executes the rounds."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Count the time of the context."""
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += perf_counter() - began

    def waiting(self, part: Part, results: Iterator[T]) -> Iterator[T]:
        """The same results; the time until each one comes is counted."""
        while True:
            with self.part(part):
                result = next(results, None)
            if result is None:
                return
            yield result

    def seconds(self, total: float) -> dict[str, float]:
        """Seconds by what they were used for, of a run that took `total` seconds."""
        known = {text: self._seconds[part] for part, text in PARTS.items()}
        return {**known, OTHER: max(0.0, total - sum(known.values()))}
