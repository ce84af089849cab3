"""Events and commands of the round state machine: frozen values, compared by content.

An event is something that happened to one run. A command is something that its driver has to do. `machine.py` turns
events into commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EndStatus = Literal["completed", "stopped", "failed"]
Source = Literal["server", "clients", "earlier"]
"""Where an evaluation comes from: the server's held-out data, or the clients'. "earlier": from the server's, of a model
before the latest one."""
Accepted = tuple[tuple[str, bytes], ...]
"""(client, digest) of the accepted updates of an exchange, in the order of id bytes."""


# Events: what happened.


@dataclass(frozen=True, slots=True)
class RosterChanged:
    """Other clients can be drawn now. `settled`: every expected client is back, or was waited for."""

    eligible: tuple[str, ...]
    settled: bool
    shut_out: int = 0
    """Clients that the run lacks and does not wait for: in quarantine, banned, lost for long."""


@dataclass(frozen=True, slots=True)
class UpdateAdmitted:
    """A client's update was admitted: it is in the spool and in the ledger."""

    client: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class ClientDroppedOut:
    """An outstanding client will not deliver: lost, failed, refused, banned."""

    client: str
    cause: str = ""
    """Type and place of the error, if the task's own code raised one."""
    why: str = ""
    """The reason in words, with a cause."""


@dataclass(frozen=True, slots=True)
class ClientReturned:
    """A client that had dropped out can deliver again."""

    client: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of the attempt has passed."""


@dataclass(frozen=True, slots=True)
class RoundRestored:
    """The current round was restored from the ledger after a restart."""


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The wait of RetryLater is over."""


@dataclass(frozen=True, slots=True)
class ExchangeReduced:
    """The updates of an exchange are reduced; the next exchange can be sent."""


@dataclass(frozen=True, slots=True)
class CulpritsFound:
    """Some accepted updates make the result unusable: the exchange must be reduced without them."""

    culprits: tuple[tuple[str, str], ...]
    """(client, why)."""
    relative: bool = False
    """Whether only the other updates of the exchange speak against them; else, the sum was not finite."""


@dataclass(frozen=True, slots=True)
class StatesLost:
    """A client's state is lost: the states of all clients, and the server's sum of them, must be reset."""

    why: str
    state_epoch: int | None = None
    """The epoch in which it was lost; the event does nothing in a later epoch. None: the current epoch."""


@dataclass(frozen=True, slots=True)
class StepComputed:
    """The server step is computed; the new model is in memory."""


@dataclass(frozen=True, slots=True)
class ModelCommitted:
    """The new model is durable."""

    evaluating: bool = False
    """Whether the server still evaluates an earlier model: it evaluates one at a time."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation is finished or has failed."""

    by: Source = "server"
    round: int | None = None
    """The evaluated round; None: the one that the run waits for.

    A commit may be processed between the end of an evaluation and this event.
    """


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """An operator pauses the run: no new round until ResumeRequested."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """An operator resumes the run."""


@dataclass(frozen=True, slots=True)
class Extended:
    """The run gets a new number of rounds."""

    rounds: int


@dataclass(frozen=True, slots=True)
class EndRequested:
    """A stop rule, an operator or an error ends the run."""

    status: EndStatus
    reason: str
    broken: bool = False
    """Whether a command or a computation failed: the run cannot commit the model that it computes."""


Event = (
    RosterChanged | UpdateAdmitted | ClientDroppedOut | ClientReturned | DeadlinePassed | RoundRestored | RetryDue
    | ExchangeReduced | CulpritsFound | StatesLost | StepComputed | ModelCommitted | Evaluated | PauseRequested
    | ResumeRequested | Extended | EndRequested
)  # fmt: skip


# Commands: what the driver has to do, in order.


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Write the cohort to the ledger, push assignments to it, and start the deadline, in this order."""

    round: int
    exchange: int
    attempt: int
    cohort: tuple[str, ...]
    """Clients that are new in this attempt; empty if only the deadline starts again."""


@dataclass(frozen=True, slots=True)
class QuorumMissed:
    """Report that an attempt ended with too few updates. The next commands start another attempt."""

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
    """No client is left to draw: post RetryDue after a wait, so that clients that failed can be drawn again."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the work of these clients."""

    clients: tuple[str, ...]
    exchange: int


@dataclass(frozen=True, slots=True)
class RestartRound:
    """Remove an uncommitted round from the ledger."""

    round: int
    why: str
    states: bool
    """Whether the clients' states are reset too, in a new epoch."""


@dataclass(frozen=True, slots=True)
class ReduceExchange:
    """Write the accepted list to the ledger, reduce its updates, and compute the bundles of the next exchange."""

    accepted: Accepted


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Write the accepted list to the ledger, reduce its updates, and compute the server step."""

    accepted: Accepted


@dataclass(frozen=True, slots=True)
class DropCulprits:
    """Refuse accepted updates and remove the accepted list. The next commands close the exchange without them."""

    round: int
    exchange: int
    culprits: tuple[tuple[str, str], ...]
    relative: bool = False
    """As in `CulpritsFound`."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Make the new model durable."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Send the outcomes of a committed round, remove its files, and start the evaluations that are due."""

    round: int
    evaluate: bool
    ask_clients: bool = False
    """Whether clients evaluate too."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """End the run."""

    status: EndStatus
    reason: str


Command = (
    OpenAttempt | QuorumMissed | AwaitClients | RetryLater | Cancel | RestartRound | ReduceExchange | ComputeStep
    | Commit | DropCulprits | Announce | EndRun
)  # fmt: skip
