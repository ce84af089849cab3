"""What the round state machine is told, and what it asks for: frozen values, compared by content.

An event says what happened to one run; a command says what its driver has to do. `rounds.py` turns the one into the
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EndStatus = Literal["completed", "stopped", "failed"]
Source = Literal["server", "clients"]
"""Who evaluates: the server on its held-out data, or clients on theirs."""
Accepted = tuple[tuple[str, bytes], ...]
"""(client, digest) of the updates that make an exchange, in the order of id bytes."""


# Events: what happened.


@dataclass(frozen=True, slots=True)
class RosterChanged:
    """Who could be drawn now. `settled`: the roster is complete, or was waited for long enough."""

    eligible: tuple[str, ...]
    settled: bool


@dataclass(frozen=True, slots=True)
class UpdateAdmitted:
    """A client's update is in the spool and in the ledger."""

    client: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class ClientOut:
    """An outstanding client will not deliver: lost, failed, refused, banned."""

    client: str


@dataclass(frozen=True, slots=True)
class ClientBack:
    """A client that was out can deliver again."""

    client: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The attempt's time is over."""


@dataclass(frozen=True, slots=True)
class PickedUp:
    """The round under way was read back from the ledger after a restart."""


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The wait that RetryLater asked for is over."""


@dataclass(frozen=True, slots=True)
class ExchangeReduced:
    """What an exchange collected has been reduced; the next exchange can go out."""


@dataclass(frozen=True, slots=True)
class CulpritsFound:
    """Accepted updates spoil what the exchange comes to: it must be reduced without them."""

    culprits: tuple[tuple[str, str], ...]
    """(client, why)."""


@dataclass(frozen=True, slots=True)
class StatesLost:
    """A client's state is gone: all clients' states, and what the server keeps of them, must start anew."""

    why: str
    state_epoch: int | None = None
    """In which it was lost; nothing is left to do in a later one. None: in whichever it is taken."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The server step is computed."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The new model is durable."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation that was waited for is there, or has failed."""

    by: Source = "server"


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """No new round until ResumeRequested."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Rounds go on."""


@dataclass(frozen=True, slots=True)
class Extended:
    """The run is to have this many committed rounds."""

    rounds: int


@dataclass(frozen=True, slots=True)
class EndRequested:
    """The run is to end: by a stop rule, an operator, or an error."""

    status: EndStatus
    reason: str


Event = (
    RosterChanged | UpdateAdmitted | ClientOut | ClientBack | DeadlinePassed | PickedUp | RetryDue | ExchangeReduced
    | CulpritsFound | StatesLost | Stepped | Committed | Evaluated | PauseRequested | ResumeRequested | Extended
    | EndRequested
)  # fmt: skip


# Commands: what is to be done, in order.


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Write the cohort down, then push assignments to it, then start the deadline."""

    round: int
    exchange: int
    attempt: int
    cohort: tuple[str, ...]
    """Clients that are new in this attempt; may be empty when only the deadline is renewed."""


@dataclass(frozen=True, slots=True)
class QuorumMissed:
    """An attempt has closed with too few updates; what follows in the list is another try."""

    round: int
    exchange: int
    attempt: int
    admitted: int
    quorum: int


@dataclass(frozen=True, slots=True)
class AwaitClients:
    """Too few clients for a draw: say so."""

    needed: int
    present: int


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Nobody is left to draw; give those who failed another chance after a while."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell clients that their work is not wanted any more."""

    clients: tuple[str, ...]
    exchange: int


@dataclass(frozen=True, slots=True)
class RestartRound:
    """Forget what the ledger has of a round that is not committed."""

    round: int
    why: str
    states: bool
    """Clients' states start anew with it, in a new epoch."""


@dataclass(frozen=True, slots=True)
class ReduceExchange:
    """Fix the accepted list, reduce it, make what the next exchange sends."""

    accepted: Accepted


@dataclass(frozen=True, slots=True)
class Step:
    """Fix the accepted list, reduce it, compute the server step."""

    accepted: Accepted


@dataclass(frozen=True, slots=True)
class DropCulprits:
    """Refuse accepted updates, and forget the list that they are on; what follows closes the exchange without them."""

    round: int
    exchange: int
    culprits: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Make the new model durable."""


@dataclass(frozen=True, slots=True)
class Announce:
    """The round is committed: tell its clients the outcome, tidy up, start the evaluations that are due."""

    round: int
    evaluate: bool
    ask_clients: bool = False
    """Clients are to evaluate too."""


@dataclass(frozen=True, slots=True)
class End:
    """The run is over."""

    status: EndStatus
    reason: str


Command = (
    OpenAttempt | QuorumMissed | AwaitClients | RetryLater | Cancel | RestartRound | ReduceExchange | Step | Commit
    | DropCulprits | Announce | End
)  # fmt: skip
