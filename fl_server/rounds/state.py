"""The state of a run's rounds. Values only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from fl_server.rounds.by_client import Arrivals, BufferedUpdate, ByClient, Failed, Lost, Refused, Work
from fl_server.rounds.effects import Effect
from fl_server.rounds.events import Accepted, EndStatus, Event, Graph, Source
from fl_server.rounds.metrics import Judged
from fl_server.rounds.sampling import RoundPolicy, within_population

_NOT_JUDGED = Judged()

MOST_COMEBACKS = 3
"""Failures of a client in one exchange after which it is not asked again when it returns: each time would start the
attempt's whole deadline again. It may still be drawn at a retry."""


class Phase(Enum):
    """The phase of a run."""

    SELECTING = "selecting"
    AGREEING = "agreeing"
    TOSSING = "tossing"
    SHARING = "sharing"
    COLLECTING = "collecting"
    SIGNING = "signing"
    OPENING = "opening"
    REDUCING = "reducing"
    STEPPING = "stepping"
    COMMITTING = "committing"
    EVALUATING = "evaluating"
    ENDED = "ended"


BEFORE_MASKS = frozenset({Phase.AGREEING, Phase.TOSSING, Phase.SHARING})
"""Stages of secure aggregation in which the clients train."""
AFTER_MASKS = frozenset({Phase.SIGNING, Phase.OPENING})
"""Stages in which the masked updates are here."""
STAGES = BEFORE_MASKS | AFTER_MASKS
"""Phases of a round with secure aggregation in which each client gets one message and gives one answer."""


_NONE: ByClient[Any] = ByClient()


@dataclass(frozen=True)
class RoundState:
    """Everything that decides what happens next in a run."""

    policy: RoundPolicy
    rounds: int
    """The run is complete after this many committed rounds."""
    round: int = 0
    attempt: int = 0
    first_attempt: int = 0
    """First attempt since the round was last redrawn; updates of earlier attempts are void."""
    exchange: int = 0
    phase: Phase = Phase.SELECTING
    paused: bool = False
    eligible: tuple[str, ...] = ()
    """Clients that are here for the run, from the last RosterChanged."""
    shut_out: int = 0
    """Clients that are not eligible and not waited for, from the last RosterChanged."""
    settled: bool = False
    """False after a start until every expected client is back or was waited for; no cohort is drawn before."""
    members: frozenset[str] = frozenset()
    """Clients that belong to the population: an update of theirs counted since the last reset of client states."""
    over_selection: float = 0.0
    """Over-selection factor, adapted to the drop-outs of earlier rounds; 0: the policy's factor."""
    goal: int = 0
    """Updates wanted in this round; 0 before its first draw."""
    drawn: frozenset[str] = frozenset()
    """All clients that may deliver in this exchange."""
    out: frozenset[str] = frozenset()
    """Drawn clients that are not expected to deliver: lost, failed, refused, cancelled."""
    failed: ByClient[Failed] = _NONE
    """Drawn clients whose work in this exchange failed, and that have not delivered since; the latest comes last."""
    restarts: ByClient[int] = _NONE
    """Drawn clients whose work of this exchange was sent to another process of their daemon, with how often."""
    refused: ByClient[Refused] = _NONE
    """Drawn clients with a refused update of this exchange. They are not drawn again for the round."""
    admitted: Sequence[tuple[str, bytes]] = ()
    """(client, digest) in order of arrival; any sequence becomes `Arrivals`."""
    accepted: Accepted = ()
    """The accepted list of the last exchange, in the order of id bytes; with a buffer, in the order of arrival."""
    versions: tuple[int, ...] = ()
    """With a buffer: the version of each accepted update."""
    work: ByClient[Work] = _NONE
    """With a buffer: what each drawn client has to do."""
    buffer: tuple[BufferedUpdate, ...] = ()
    """With a buffer: the admitted updates that no step has taken, in the order of arrival. `admitted` is empty."""
    fixed: Accepted = ()
    """The accepted list in the ledger, after a restart. Only these updates can close the exchange."""
    cancelled: frozenset[str] = frozenset()
    """With a fixed list: those who were drawn and are not in it. If the exchange reopens they may deliver after all, so
    each of them has a place of the population."""
    repeated: bool = False
    """Whether this exchange was closed before, and reopened because an update was dropped."""
    awaited: frozenset[Source] = frozenset()
    """The evaluations that EVALUATING waits for: those of the previous round that are awaited."""
    state_epoch: int = 0
    """How often the client states were reset."""
    epoch_rounds: int = 0
    """Rounds that were committed since."""
    lost: ByClient[Lost] = _NONE
    """Clients that lost their state too early for a reset. They are not drawn before it."""
    states_lost: str = ""
    """Why the client states are reset after the commit of the current step; empty if they are not."""
    judged: Judged = _NOT_JUDGED
    """The evaluations since the run was created, resumed after a failure or extended, as the stop rules need them."""
    judged_from: int = 0
    """The first round whose evaluation was not judged yet; each is judged once."""
    metric_seen: bool = False
    """Whether an evaluation had the metric of the stop rules."""
    wall_time_s: float = 0.0
    """The run is complete after so much time; 0: no limit."""
    elapsed_s: float = 0.0
    """Time that it has used."""
    draws: int = 0
    """First draws of rounds so far, of those that were redrawn too: each is charged to the privacy account."""
    answered: frozenset[str] = frozenset()
    """Clients whose answers to the stage under way are here; of `drawn` and not of `out`."""
    graph: Graph | None = None
    """The graph of the round's shares, once the keys are here."""
    sharers: frozenset[str] = frozenset()
    """Clients whose shares are with their neighbours: those that may send a masked update."""
    resting: bool = False
    """Whether the next draw of an abandoned round waits for RetryDue: the cohort before lost its clients, too."""
    ending: tuple[EndStatus, str] | None = None
    """How and why the run ends after the current step, or has ended."""
    failed_by: Literal["", "not_finite", "norm", "layout", "task"] = ""
    """The fault of the run itself because of which it has ended; "task": an error in the task's code."""

    def __post_init__(self) -> None:
        if not isinstance(self.admitted, Arrivals):
            object.__setattr__(self, "admitted", Arrivals(self.admitted))

    @property
    def arrivals(self) -> Arrivals:
        """`admitted`."""
        return self.admitted  # type: ignore[return-value]  # see __post_init__

    @property
    def candidates(self) -> tuple[str, ...]:
        """Eligible clients that the round and the population limit allow."""
        eligible = self.eligible
        if self.refused or self.lost or self.failed:
            eligible = tuple(client for client in eligible if not self.barred(client))
        if not self.policy.population:
            return eligible
        return within_population(eligible, self.members | self.drawn, self.policy.population)

    def barred(self, client: str) -> bool:
        """Whether the client is not drawn before the next round, or before the client states are reset."""
        failed = self.failed.get(client)
        return client in self.refused or client in self.lost or (failed is not None and failed.repeats)

    def may_return(self, client: str) -> bool:
        """Whether a client of the cohort that has dropped out is asked once more when it is available again."""
        if not self.under_way or client not in self.out or self.barred(client) or self.restarts_too_often(client):
            return False
        if self.policy.buffered and (self.work[client].late or self.working >= self.policy.concurrency):
            return False
        at = bisect_left(self.eligible, client.encode(), key=str.encode)
        if self.eligible[at : at + 1] != (client,):
            return False
        return client not in self.failed or self.failed[client].times < MOST_COMEBACKS

    def restarts_too_often(self, client: str) -> bool:
        """Whether so many processes of the client had the work of this exchange that no other is asked."""
        return 0 < self.policy.most_processes <= self.restarts.get(client, 0)

    @property
    def computing(self) -> bool:
        """Whether a reduction, server step or commit is under way. A stopping coordinator waits for it."""
        return self.phase in (Phase.REDUCING, Phase.STEPPING, Phase.COMMITTING)

    @property
    def may_restart_states(self) -> bool:
        """Whether enough rounds were committed in this epoch for another restart because of a lost state."""
        return not self.state_epoch or self.epoch_rounds >= self.policy.rounds_between_restarts

    @property
    def collected(self) -> int:
        """Updates that are here for the step of this round; with a buffer, also those for the next one."""
        if not self.policy.buffered:
            return len(self.admitted)
        return len(self.buffer) + (len(self.accepted) if self.computing else 0)

    @property
    def fills(self) -> int:
        """Updates that this step, or with a buffer the one that the next update is in, still lacks."""
        return self.goal - len(self.admitted) if not self.policy.buffered else -len(self.buffer) % self.policy.goal

    @property
    def versions_in_use(self) -> frozenset[int]:
        """With a buffer: the models from which clients work, or updates began that no committed step has taken."""
        computing = self.versions if self.computing else ()
        return frozenset(
            {*(work.version for work in self.work.values()), *(update.version for update in self.buffer), *computing}
        )

    def awaits(self, version: int, client: str) -> bool:
        """With a buffer: whether it is not known yet if the client's update of this version will count."""
        computing = zip(self.accepted, self.versions, strict=True) if self.computing else ()
        here = {(client, version) for client, version, _ in self.buffer} | {(one, of) for (one, _), of in computing}
        return (client, version) in here or (client in self.work and self.work[client].version == version)

    @property
    def delivered(self) -> AbstractSet[str]:
        """Clients whose updates of the current model are here."""
        if not self.policy.buffered:
            return set(self.arrivals.clients())
        return {client for client, version, _ in self.buffer if version == self.round}

    def too_stale(self, version: int) -> bool:
        """Whether an update of this version that comes now would count in a step that is too many versions later.

        Updates count in the order of arrival, so those in the buffer say which step that is. It is not later for an
        update that is in the buffer: a refused one before it brings it forward.
        """
        first = self.round + 1 if self.computing else self.round
        return first + len(self.buffer) // self.policy.goal - version > self.policy.max_staleness

    def not_wanted(self, place: tuple[int, int], client: str) -> Literal["", "late", "stale", "not assigned"]:
        """Why no update and no failure of the client counts for (round, exchange); empty if it would."""
        if self.policy.buffered:
            return self._not_in_buffer(place, client)
        if not self.collects or place != (self.round, self.exchange):
            return "late"
        return "" if client in self.drawn else "not assigned"

    def _not_in_buffer(self, place: tuple[int, int], client: str) -> Literal["", "late", "stale", "not assigned"]:
        if not self.collects:
            return "late"
        if place[0] <= self.round and self.too_stale(place[0]):
            return "stale"
        if client in self.work and place == (self.work[client].version, 0):
            return ""
        return "late" if place < (self.round, 0) or client in self.delivered else "not assigned"

    def place_of(self, client: str) -> tuple[int, int]:
        """The (round, exchange) of the client's work."""
        return (self.work[client].version, 0) if client in self.work else (self.round, self.exchange)

    def undecided(self, place: tuple[int, int], client: str) -> bool:
        """Whether no update of the client for (round, exchange) has its verdict yet."""
        if self.policy.buffered:
            return not self._not_in_buffer(place, client) and client not in self.refused
        if not self.collects or place != (self.round, self.exchange):
            return False
        return client not in self.refused and not self.arrivals.has(client)

    @property
    def enough(self) -> bool:
        """Whether a cohort can be drawn: all clients are here, or a quorum, and the others are not waited for."""
        policy, here = self.policy, len(self.candidates)
        fewest = max(policy.quorum, policy.min_accepted)
        if here >= policy.min_clients or here < fewest:
            return here >= policy.min_clients
        # With a buffer a client may be refused before the round is open. The next round draws it: none waits for it.
        refused = sum(self.barred(client) and client not in self.lost for client in self.eligible)
        return here + self.shut_out + refused >= policy.min_clients

    @property
    def draws_per_update(self) -> float:
        """Clients drawn for each update wanted."""
        return (self.over_selection or self.policy.over_selection) if self.policy.close == "goal" else 1.0

    @property
    def collects(self) -> bool:
        """Whether updates count: x_t was sent and is unchanged, or the run has a buffer."""
        if self.policy.buffered:
            return self.phase is not Phase.ENDED
        return self.phase is Phase.COLLECTING or (self.phase is Phase.SELECTING and self.goal > 0)

    @property
    def under_way(self) -> bool:
        """Whether clients may still deliver or answer for the exchange."""
        return self.collects or self.staged

    @property
    def staged(self) -> bool:
        """Whether a stage of secure aggregation is under way."""
        return self.policy.secure and self.phase in STAGES

    @property
    def outstanding(self) -> frozenset[str]:
        """Clients that are working for this exchange. It looks at the whole cohort: see `works` and `working`."""
        if self.staged:
            return self.drawn.difference(self.out, self.answered if self.phase in AFTER_MASKS else ())
        return self.drawn.difference(self.out, self.arrivals.clients())

    def works(self, client: str) -> bool:
        """Whether the client is one of `outstanding`. One that trains does so after its answer, too."""
        if client not in self.drawn or client in self.out:
            return False
        if self.staged:
            return self.phase in BEFORE_MASKS or client not in self.answered
        return not self.arrivals.has(client)

    @property
    def working(self) -> int:
        """The number of `outstanding` clients: every drawn client works, is out, or has delivered."""
        if self.staged:
            return len(self.outstanding)
        return len(self.drawn) - len(self.out) - len(self.admitted)

    @property
    def unanswered(self) -> frozenset[str]:
        """Clients whose answers the stage under way waits for."""
        return self.drawn.difference(self.out, self.answered)

    @property
    def survivors(self) -> frozenset[str]:
        """Clients whose masked updates are here."""
        return frozenset(self.arrivals.clients())

    @property
    def quorum(self) -> int:
        """Fewest updates that may close this round."""
        if self.policy.private:
            return 0
        wanted = self.policy.quorum or (self.goal + 1) // 2
        return max(min(wanted, self.goal), self.policy.min_accepted)

    def workers_since(self, before: RoundState) -> tuple[AbstractSet[str], AbstractSet[str]]:
        """Clients that work now and did not work in an earlier state of the run, and the reverse.

        As long as no clients are drawn it looks at those alone that delivered, dropped out or returned in between.
        """
        grows = self.drawn is before.drawn and self.phase is before.phase and len(self.admitted) >= len(before.admitted)
        if not grows or self.staged:
            was, now = before.outstanding, self.outstanding
            return now - was, was - now
        begun = {client for client in before.out - self.out if self.works(client)}
        done = {*self.arrivals.clients(len(before.admitted)), *(self.out - before.out)}
        return begun, {client for client in done if before.works(client)}


if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414 - so that the names and types of the fields are checked
else:

    def replace(state, /, **fields):
        """The state with other values in some fields, without a call for each: an event changes few of them."""
        after = object.__new__(RoundState)
        object.__setattr__(after, "__dict__", state.__dict__ | fields)
        if "admitted" in fields:
            after.__post_init__()
        return after


Result = tuple[RoundState, tuple[Effect, ...]]
"""What a rule returns: the next state, and the effects to carry out in this order."""
Rule = Callable[[RoundState, Any], Result]
"""What a phase does about one kind of event."""


class UnexpectedEvent(Exception):
    """The phase has no rule for the event. Nothing was changed. The caller of the state machine made the error."""

    def __init__(self, event: Event, state: RoundState, why: str = "no rule for it") -> None:
        super().__init__(f"{type(event).__name__} in phase {state.phase.value} of round {state.round}: {why}")
        self.event = event
        self.state = state
