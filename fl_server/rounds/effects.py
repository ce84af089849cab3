"""Effects of the round state machine: what its driver has to do, in the order in which `advance` returns them.

The contract of order. A driver carries out the effects one after the other, and each of them in three steps:

1. *Write*: what the effect names is durable in the ledger or on disk.
2. *Act*: compute, set timers, remove files, change what the driver has in memory.
3. *Send*: messages to clients and operators.

The next effect begins when all three are done, but for the long work of `ReduceExchange`, `ComputeStep`, `Commit` and
`Announce`: it goes on, and its end is an event. Nothing is sent that is not written. A driver that keeps this order may
be killed between any two steps. At its start it restores the state from the ledger with `restoring.restored`, gives
`RoundRestored` to `advance`, and does what it finds written and not done: the same effects, which change nothing where
they were done before. An effect whose write fails is tried again until it succeeds, or the run ends with
`EndRequested(..., broken=True)` in the same turn: no event is processed in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_server.rounds.events import Accepted, CulpritFault, EndStatus

RETRY_S = 10.0
"""Wait of RetryLater: seconds before clients that failed in a round are drawn for it again."""


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Write the cohort; start the deadline; send assignments to all that work."""

    round: int
    exchange: int
    attempt: int
    cohort: tuple[str, ...]
    """Clients that are new in this attempt; empty if only the deadline starts again."""


@dataclass(frozen=True, slots=True)
class OpenStage:
    """Write the members of a stage of secure aggregation; start its deadline; send each what it needs."""

    round: int
    exchange: int
    attempt: int
    stage: str
    """The value of its phase; "collecting" for the masked updates."""
    members: tuple[str, ...]
    """The clients that are asked, in the order of id bytes."""
    closed: tuple[str, ...]
    """The clients whose answers ended the stage before, in this order. What is sent is made of their answers."""


@dataclass(frozen=True, slots=True)
class QuorumMissed:
    """Report that an attempt ended with too few updates. The next effects start another attempt."""

    round: int
    exchange: int
    attempt: int
    admitted: int
    quorum: int


@dataclass(frozen=True, slots=True)
class AwaitClients:
    """Report that there are too few clients for a draw."""

    needed: int
    present: int


@dataclass(frozen=True, slots=True)
class RetryLater:
    """No client is left to draw: RetryDue comes after a wait, so that clients that failed can be drawn again."""


@dataclass(frozen=True, slots=True)
class SendWork:
    """Send a client that works its assignment again: its state starts from zero now."""

    client: str


@dataclass(frozen=True, slots=True)
class RecordFailure:
    """Write that the work of a client has failed. It is out already."""

    client: str
    why: str


@dataclass(frozen=True, slots=True)
class DeadlineMissed:
    """These clients were at work when a deadline passed in which at least as many delivered."""

    clients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Send these clients that their work is not wanted any more."""

    clients: tuple[str, ...]
    exchange: int
    rounds: tuple[int, ...] = ()
    """The round of each client's work; empty if it is the round under way."""


@dataclass(frozen=True, slots=True)
class RestartRound:
    """Write the removal of an uncommitted round, and the epoch; forget what the round collected."""

    round: int
    why: str
    states: bool
    """Whether the clients' states are reset too, in a new epoch."""
    state_epoch: int = 0
    """The epoch from now on."""
    past_draws: int = 0
    """With secure aggregation: the draws of the round that are over. The next one has this number, also after a
    restart: a client that has answered a draw answers no other one with its number."""


@dataclass(frozen=True, slots=True)
class ReduceExchange:
    """Write the accepted list; reduce its updates, and compute the bundles of the next exchange."""

    accepted: Accepted


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Write the accepted list; reduce its updates, and compute the server step."""

    accepted: Accepted
    versions: tuple[int, ...] = ()
    """With a buffer: the version of each update. The list is in the order of the buffer then."""


@dataclass(frozen=True, slots=True)
class DropCulprits:
    """Write the refusal of accepted updates and the removal of the list; then tell their clients.

    The next effects close the exchange without them.
    """

    round: int
    exchange: int
    culprits: tuple[tuple[str, str], ...]
    fault: CulpritFault = "not_finite"
    """Its meaning is that of `CulpritsFound.fault`."""
    versions: tuple[int, ...] = ()
    """With a buffer: the version of each update that is refused."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the new model: its checkpoint, and then the row of its round."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Send the outcomes of a committed round; remove its files; start the evaluations that are due."""

    round: int
    evaluate: bool
    ask_clients: bool = False
    """Whether clients evaluate too."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """Write that the run is over; release what it holds; tell its clients."""

    status: EndStatus
    reason: str


Effect = (
    OpenAttempt | OpenStage | QuorumMissed | AwaitClients | RetryLater | SendWork | RecordFailure | DeadlineMissed
    | Cancel | RestartRound | ReduceExchange | ComputeStep | Commit | DropCulprits | Announce | EndRun
)  # fmt: skip
