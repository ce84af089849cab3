"""Where a run's rounds stand: the policy that is fixed for its life, and the state that events move.

Values only; what moves them is in `rounds.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from fl_server.events import Accepted, EndStatus, Source
from fl_server.sampling import Sampling, within_population


class Phase(Enum):
    """What a run is doing."""

    SELECTING = "selecting"
    COLLECTING = "collecting"
    REDUCING = "reducing"
    STEPPING = "stepping"
    COMMITTING = "committing"
    EVALUATING = "evaluating"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """How a run's rounds are filled and closed; fixed for its life."""

    seed: int
    sampling: Sampling = "fixed"
    clients_per_round: int = 1
    """m of fixed-size sampling."""
    rate: float = 0.0
    """p of Bernoulli sampling."""
    min_clients: int = 1
    """Clients that must be eligible before the first draw of a round."""
    close: Literal["cohort", "goal"] = "cohort"
    quorum: int = 1
    """Fewest updates that may close a round; a smaller cohort needs all of itself."""
    deadline_s: float = 600.0
    over_selection: float = 1.3
    """Clients drawn for each update wanted, with close = "goal", before any drop-out was seen."""
    exchanges: int = 1
    """Collections in a round."""
    population: int = 0
    """N, where no more clients than that may ever take part; 0: any number may."""
    evaluate_every: int = 1
    """Rounds between evaluations; 0: never."""
    await_evaluation: bool = False
    """The next round waits for the evaluation: stop rules that look at metrics need it."""
    ask_clients_every: int = 0
    """Rounds between evaluations by clients; 0: never."""
    await_clients: bool = False
    """The next round waits for theirs: the stop rule's metric is one of them."""


@dataclass(frozen=True, slots=True)
class RoundState:
    """Where a run stands. Everything that decides what happens next."""

    policy: RoundPolicy
    rounds: int
    """The run is complete after this many committed rounds."""
    round: int = 0
    attempt: int = 0
    first_attempt: int = 0
    """Of this round as it was last drawn anew: what earlier ones collected is void."""
    exchange: int = 0
    phase: Phase = Phase.SELECTING
    paused: bool = False
    eligible: tuple[str, ...] = ()
    """Clients that could be drawn now, as last told."""
    settled: bool = False
    """False after a start until the roster is back, or was waited for: nothing is drawn before."""
    members: frozenset[str] = frozenset()
    """Clients that have a place in the population: their updates counted since client states began."""
    over_selection: float = 0.0
    """As learned from the drop-outs of earlier rounds; 0: nothing was learned, and the policy's holds."""
    goal: int = 0
    """Updates wanted in this round; 0 before its first draw."""
    drawn: frozenset[str] = frozenset()
    """Everyone who may deliver in this exchange."""
    out: frozenset[str] = frozenset()
    """Of those, the ones not expected to deliver any more: lost, failed, refused, cancelled."""
    admitted: Accepted = ()
    """(client, digest) in order of arrival."""
    accepted: Accepted = ()
    """What closed the last exchange, in the order of id bytes."""
    fixed: Accepted = ()
    """After a restart: the list that was fixed for this exchange. These updates close it, and no others can."""
    repeated: bool = False
    """Whether this exchange was closed before, with an update that had to be dropped."""
    awaited: frozenset[Source] = frozenset()
    """Whose evaluations of the round before are waited for, in EVALUATING."""
    states_lost: str = ""
    """Why clients' states are to start anew once the step under way is committed; empty if they are not."""
    ending: tuple[EndStatus, str] | None = None
    """Set when the run is to end after the step under way; and why it ended."""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Of the eligible, those for whom the population has a place."""
        if not self.policy.population:
            return self.eligible
        return within_population(self.eligible, self.members | self.drawn, self.policy.population)

    @property
    def draws_per_update(self) -> float:
        """Clients drawn for each update wanted."""
        return (self.over_selection or self.policy.over_selection) if self.policy.close == "goal" else 1.0

    @property
    def collects(self) -> bool:
        """Whether updates of the round count: x_t has been sent and has not moved."""
        return self.phase is Phase.COLLECTING or (self.phase is Phase.SELECTING and self.goal > 0)

    @property
    def outstanding(self) -> frozenset[str]:
        """Clients that work for this exchange now."""
        return self.drawn - self.out - {client for client, _ in self.admitted}

    @property
    def quorum(self) -> int:
        """Fewest updates that may close this round."""
        return min(self.policy.quorum, self.goal)
