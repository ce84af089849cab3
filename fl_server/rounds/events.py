"""Events of the round state machine: what happened to one run. Frozen values, compared by content.

An event that reports something of a client (`UpdateAdmitted`, `UpdateRefused`, `WorkFailed`, `ClientRestarted`,
`StateLost`) is in the ledger before it is given to `advance`: a restart restores the state from there
(`restoring.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal

EndStatus = Literal["completed", "stopped", "failed"]
Source = Literal["server", "clients", "earlier"]
"""Where an evaluation comes from: the server's held-out data, or the clients'. "earlier": from the server's, of a model
before the latest one."""
Accepted = tuple[tuple[str, bytes], ...]
"""(client, digest) of updates; the accepted ones of an exchange are in the order of id bytes."""
Fault = Literal["", "not_finite", "norm", "layout"]
CulpritFault = Literal["", "not_finite", "norm"]
"""What is wrong with a refused update, as far as the faults of several clients may be one fault of the run."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A count with its noun, as in `fl_common.units`, which the core does not import."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


@dataclass(frozen=True, slots=True)
class Graph:
    """Who holds shares of whose secrets in a secure round, and how many clients must stay."""

    holders: Mapping[str, frozenset[str]] = field(hash=False)
    """For each client those that hold a share of its secrets, itself included."""
    threshold: int
    """Shares that open a secret."""
    quorum: int
    """Fewest clients that share, and fewest signatures on the list of survivors."""
    fewest: int
    """Fewest survivors."""

    def opens_all(self, clients: Iterable[str], openers: AbstractSet[str]) -> bool:
        """Whether the openers can open a secret of each of these clients."""
        return all(len(self.holders.get(client, frozenset()) & openers) >= self.threshold for client in clients)


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
    """Updates of clients were admitted: they are in the spool and in the ledger."""

    updates: Accepted
    """The order is that of arrival: no exchange closes between them."""


@dataclass(frozen=True, slots=True)
class StageAnswered:
    """A client's answer to the stage of secure aggregation under way is in the ledger."""

    client: str


@dataclass(frozen=True, slots=True)
class GraphMade:
    """The graph of the round's shares follows from the keys that are here."""

    graph: Graph


@dataclass(frozen=True, slots=True)
class RoundSpoiled:
    """Enough answers or masked updates of the round are here, and they cannot be used: some client lied."""

    why: str


@dataclass(frozen=True, slots=True)
class UpdateRefused:
    """An update of a client of the cohort was refused. The refusal stands: it is not drawn again for the round."""

    client: str
    fault: Fault
    why: str


@dataclass(frozen=True, slots=True)
class ClientDroppedOut:
    """An outstanding client will not deliver, for a reason outside of its work: it is lost, banned or forgotten."""

    client: str


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """The work of an outstanding client has failed."""

    client: str
    why: str = ""
    """The reason in words."""
    cause: str = ""
    """Type and place of the error, if the task's own code raised one: failures of different clients with the same
    cause come from the same line."""
    not_finite: bool = False
    """Whether the client got a NaN or an infinity."""
    repeats: bool = False
    """Whether the same work would fail again, so that the client is not drawn again for the round."""


@dataclass(frozen=True, slots=True)
class ClientRestarted:
    """The process that an outstanding client's work was sent to has ended without an answer; another one is here."""

    client: str


@dataclass(frozen=True, slots=True)
class StateLost:
    """A client at work has lost the state of its own that the work must start from."""

    client: str
    why: str
    left_out: bool = False
    """Whether it has lost it too often: it takes no part until an operator releases it."""


@dataclass(frozen=True, slots=True)
class ClientReleased:
    """An operator lets a client that was left out take part again."""

    client: str


@dataclass(frozen=True, slots=True)
class ClientReturned:
    """A client that had dropped out can deliver again."""

    client: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of an attempt has passed."""

    round: int = 0
    """With a buffer, where each draw has a deadline of its own: the draw's round and attempt."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RoundRestored:
    """The state was restored from the ledger after a restart."""


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
    fault: CulpritFault = "not_finite"
    """"not_finite": the sum was not. "norm": only the other updates of the exchange speak against them. "": their bytes
    are not those that were admitted, for which a disk or a worker is to blame."""


@dataclass(frozen=True, slots=True)
class ModelDiverged:
    """The result is not finite, and no single update is the cause."""

    why: str


@dataclass(frozen=True, slots=True)
class StatesLost:
    """States of clients are gone for good: those of all clients, and the server's sum of them, must be reset."""

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
    """An evaluation is over, and its metrics are in the ledger."""

    by: Source = "server"
    round: int | None = None
    """The evaluated round; None: the one that the run waits for.

    A commit may be processed between the end of an evaluation and this event.
    """
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The values by name; empty if it has measured nothing."""


@dataclass(frozen=True, slots=True)
class TimeUsed:
    """The run has used so much of its time since it was created. Time of a pause does not count."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """An operator pauses the run: no new round until ResumeRequested."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """An operator resumes the run."""


@dataclass(frozen=True, slots=True)
class Extended:
    """The run gets a new number of rounds, and a new limit of its time."""

    rounds: int
    wall_time_s: float = 0.0
    """0: no limit."""


@dataclass(frozen=True, slots=True)
class EndRequested:
    """A stop rule, an operator or an error ends the run."""

    status: EndStatus
    reason: str
    broken: bool = False
    """Whether a command or a computation failed: the run cannot commit the model that it computes."""


Event = (
    RosterChanged | UpdateAdmitted | UpdateRefused | StageAnswered | GraphMade | RoundSpoiled | ClientDroppedOut
    | WorkFailed | ClientReturned | ClientRestarted | StateLost | ClientReleased | DeadlinePassed | RoundRestored
    | RetryDue | ExchangeReduced | CulpritsFound | ModelDiverged | StatesLost | StepComputed | ModelCommitted
    | Evaluated | TimeUsed | PauseRequested | ResumeRequested | Extended | EndRequested
)  # fmt: skip
