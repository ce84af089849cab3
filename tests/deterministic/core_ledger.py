"""What the driver of the core has written and what it has told others: dictionaries in place of ledger and network."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from fl_server.rounds import events as ev
from fl_server.rounds.by_client import Failed, Lost, Refused

Place = tuple[int, int]
"""(round, exchange)."""


class Asked(NamedTuple):
    """A stage of secure aggregation, in one draw of a round."""

    round: int
    attempt: int
    stage: str


class Stage(NamedTuple):
    """A stage that was opened."""

    name: str
    members: tuple[str, ...]
    closed: tuple[str, ...]
    """The clients whose answers ended the stage before."""


def digest(*parts: object) -> bytes:
    """A digest of values by their text."""
    return blake2b(repr(parts).encode(), digest_size=8).digest()


@dataclass
class Clock:
    """Steps of a life as seconds."""

    now: float = 0.0
    up: float = 0.0
    """Without the time in which no coordinator ran."""

    def go_on(self, seconds: float) -> None:
        """Time passes while the coordinator is up."""
        self.now += seconds
        self.up += seconds


@dataclass
class Ledger:
    """What is durable."""

    rounds: int
    status: Any = "running"
    paused: bool = False
    reason: str = ""
    epoch: int = 0
    attempts: dict[int, list[tuple[int, int, tuple[str, ...]]]] = field(default_factory=dict)
    """Round -> (exchange, attempt, cohort)."""
    updates: dict[Place, dict[str, bytes]] = field(default_factory=dict)
    """Admitted updates in order of arrival."""
    refused: dict[Place, dict[str, Refused]] = field(default_factory=dict)
    failed: dict[Place, dict[str, Failed]] = field(default_factory=dict)
    processes: dict[Place, dict[str, int]] = field(default_factory=dict)
    """How often the work of each client was sent to another process of it."""
    fixed: dict[Place, ev.Accepted] = field(default_factory=dict)
    arrived: list[tuple[int, str]] = field(default_factory=list)
    """With a buffer: (version, client) of the admitted updates in the order of arrival."""
    versions: dict[Place, tuple[int, ...]] = field(default_factory=dict)
    """With a buffer: the versions of the updates of each fixed list."""
    given_up: set[tuple[int, str]] = field(default_factory=set)
    """With a buffer: what no step had taken when the run ended."""
    commits: list[tuple[bytes, ev.Accepted, int, float]] = field(default_factory=list)
    """(model, accepted list, epoch, over-selection factor) by round."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    by_clients: set[int] = field(default_factory=set)
    lost: dict[str, Lost] = field(default_factory=dict)
    """States that wait for a reset."""
    charged: list[tuple[int, int]] = field(default_factory=list)
    """(round, attempt) of each draw of a private run. Nothing removes them."""
    stages: dict[int, list[Stage]] = field(default_factory=dict)
    """Round -> the stages of its draw that were opened, after the first."""
    answers: dict[Asked, set[str]] = field(default_factory=dict)
    """The clients whose answers are written."""
    judged_from: int = 0
    seconds_left: float = 0.0
    """Until the deadline of the attempt under way, as it was written last."""
    restarts: set[int] = field(default_factory=set)
    """Rounds that were redrawn."""
    objects: dict[tuple[int, int, str], str] = field(default_factory=dict)
    """With an object store: (round, exchange, client) -> the key of the object that counts."""
    removals: list[str] = field(default_factory=list)
    """Keys of objects that are to be removed."""

    @property
    def model(self) -> bytes:
        """The latest model."""
        return self.commits[-1][0] if self.commits else b"first"


@dataclass
class Told:
    """What has left the coordinator, and so cannot be taken back."""

    assigned: dict[str, tuple[int, int, int, bytes]] = field(default_factory=dict)
    """Client -> (round, exchange, epoch, model) of its work."""
    acknowledged: dict[tuple[int, int, str], bytes] = field(default_factory=dict)
    opened: float = 0.0
    """`Clock.up` when the attempt or the stage under way was written."""
    gives: float = 0.0
    """Its time."""
    present: frozenset[str] = frozenset()
    """Clients with a session."""
    asked: dict[str, Asked] = field(default_factory=dict)
    """Client -> the stage that it has to answer."""
    masks: dict[str, tuple[int, int, tuple[str, ...]]] = field(default_factory=dict)
    """Client -> (round, attempt, those with whom its update is masked)."""
    cohorts: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    messages: dict[Asked, Stage] = field(default_factory=dict)
    lists: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    """(round, attempt) -> the survivors whose list was sent."""
