"""The state of a run after a restart, from what the ledger has of it. All that decides is in the ledger or follows.

| field of `RoundState` | from |
| --- | --- |
| round, over_selection, epoch_rounds | the committed rounds |
| attempt, exchange, goal, drawn | the attempts of the round under way |
| admitted, refused, out | its updates with whole bytes, its refusals, and the clients that are present |
| work, buffer | with a buffer: the attempts and updates of all versions in use, without those that a step has taken |
| failed, restarts | the failures of its work, with how often and whether a value was not finite, and its restarts |
| fixed, cancelled | the accepted list, if the computation had begun, and the others of the attempts |
| answered, graph, sharers | the stages of secure aggregation and their answers |
| lost, members, state_epoch | the clients' records of lost states, the updates that counted, and the run's record |
| judged, metric_seen, awaited | the evaluations of the committed rounds |
| elapsed_s, paused, rounds, wall_time_s | the run's record |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from fl_server.rounds.by_client import BufferedUpdate, ByClient, Failed, Refused, Work
from fl_server.rounds.collecting import close_if_done
from fl_server.rounds.committing import awaited_evaluations, go_on
from fl_server.rounds.effects import EndRun
from fl_server.rounds.ending import cancel, end_by_fault, ended, training_diverges
from fl_server.rounds.events import Accepted, Graph, RoundRestored, Source
from fl_server.rounds.metrics import Evaluation, Judged, stop_reason
from fl_server.rounds.sampling import by_id
from fl_server.rounds.secure import abandon
from fl_server.rounds.selecting import lost_states, restart_round
from fl_server.rounds.state import AFTER_MASKS, BEFORE_MASKS, Phase, Result, RoundState, replace


@dataclass(frozen=True, slots=True)
class SavedRound:
    """What the ledger has of the round under way. Without attempts it was not drawn yet."""

    attempts: Sequence[tuple[int, int, tuple[str, ...]]]
    """(exchange, attempt, the clients that were new in it), in order. With secure aggregation one without clients
    stands for the draws up to it, which are over."""
    admitted: Accepted = ()
    """The admitted updates of the last exchange whose bytes are whole, in order of arrival."""
    fixed: Accepted | None = None
    """The accepted list of the last exchange, if it is in the ledger: its computation had begun."""
    refused: Mapping[str, Refused] = field(default_factory=dict)
    """The refused updates of the last exchange, by client."""
    failed: Mapping[str, Failed] = field(default_factory=dict)
    """The clients whose work in the last exchange failed."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """How often the work of the last exchange was sent to another process of a client."""
    stages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """With secure aggregation: the members of each stage after the first that was opened, in order."""
    answered: frozenset[str] = frozenset()
    """The clients whose answers to the last stage are in the ledger."""
    graph: Graph | None = None
    """The graph of the round's shares, if its keys and coins are there."""
    work: Mapping[str, Work] = field(default_factory=dict)
    """With a buffer: the latest work of each client without an admitted update, also of earlier versions."""
    buffer: tuple[BufferedUpdate, ...] = ()
    """With a buffer: the admitted updates that no committed step has taken: a fixed list first, then by arrival."""

    @property
    def exchange(self) -> int:
        """The exchange under way."""
        return max((exchange for exchange, _, _ in self.attempts), default=0)


def restored_round(state: RoundState, saved: SavedRound) -> RoundState:
    """The state in the round under way. state: before the first draw of that round."""
    if state.policy.buffered:
        return _with_buffer(state, saved)
    if not saved.attempts:
        return state
    exchange, attempts = saved.exchange, saved.attempts
    if state.policy.secure:
        state = _after_past_draws(state, saved)
        attempts = [entry for entry in attempts if entry[2]]
        if not attempts:
            return state
    cohorts = [(attempt, cohort) for number, attempt, cohort in attempts if number == exchange]
    first = cohorts[0][1]
    delivered = {client for client, _ in saved.admitted} | saved.refused.keys()
    state = replace(
        state,
        phase=Phase.COLLECTING,
        first_attempt=min(attempt for _, attempt, _ in attempts),
        exchange=exchange,
        attempt=cohorts[-1][0],
        goal=len(first) if exchange else state.policy.goal_of(first),
        drawn=frozenset(client for _, cohort in cohorts for client in cohort),
        admitted=saved.admitted,
        refused=ByClient(saved.refused),
        failed=ByClient({client: failure for client, failure in saved.failed.items() if client not in delivered}),
        restarts=ByClient(saved.restarts),
    )
    if state.policy.secure:
        return _in_stage(state, saved)
    if saved.fixed is not None:
        # The list was fixed and the computation had begun: the exchange consists of these updates and no others.
        # The goal stays: the quorum follows from it if one of them is dropped.
        members, entries = frozenset(client for client, _ in saved.fixed), set(saved.admitted)
        admitted = tuple(entry for entry in saved.fixed if entry in entries)
        state = replace(state, drawn=members, cancelled=state.drawn - members, fixed=saved.fixed, admitted=admitted)
    return state


def _after_past_draws(state: RoundState, saved: SavedRound) -> RoundState:
    """The state before the next draw. A round that was drawn again has its number of draws in the ledger."""
    past = max((attempt + 1 for _, attempt, cohort in saved.attempts if not cohort), default=0)
    return replace(state, attempt=past, first_attempt=past)


def _with_buffer(state: RoundState, saved: SavedRound) -> RoundState:
    """The state with a buffer. A fixed list is its beginning, so the same step follows.

    Work whose update would be too stale was withdrawn at the last commit, or would be by the updates that came since.
    A client without work may be drawn for the current version once more, and its earlier processes count then.
    """
    state = replace(state, buffer=saved.buffer)
    current = {client for client, one in saved.work.items() if one.version == state.round}
    saved_restarts = ByClient(saved.restarts)
    work = ByClient({client: work for client, work in saved.work.items() if not state.too_stale(work.version)})
    state = replace(
        state, work=work, drawn=frozenset(work), refused=ByClient(saved.refused), failed=ByClient(saved.failed),
        restarts=saved_restarts.without(saved_restarts.keys() - work.keys() - current),
    )  # fmt: skip
    if not saved.attempts:
        return state
    attempts = [attempt for _, attempt, _ in saved.attempts]
    return replace(
        state, phase=Phase.COLLECTING, goal=state.policy.goal, attempt=max(attempts), first_attempt=min(attempts)
    )  # fmt: skip


def _in_stage(state: RoundState, saved: SavedRound) -> RoundState:
    """The state of a round with secure aggregation, in the last stage that was opened.

    Its step may have begun: then all that it needs is there, and the stage ends again with the same list.
    """
    stage, members = ([(Phase.AGREEING.value, tuple(state.drawn)), *saved.stages.items()])[-1]
    phase, sharers = Phase(stage), frozenset(saved.stages.get(Phase.COLLECTING.value, ()))
    survivors = by_id(saved.stages.get(Phase.SIGNING.value, ()))
    digests = dict(saved.admitted)
    # Without the bytes of one the list stays empty, and the round cannot go on.
    whole = all(client in digests for client in survivors)
    return replace(
        state, phase=phase, drawn=frozenset(members), answered=saved.answered & set(members), graph=saved.graph,
        sharers=sharers, accepted=tuple((client, digests[client]) for client in survivors) if whole else (),
        admitted=saved.admitted if sharers else (),
    )  # fmt: skip


def without_absent(state: RoundState, present: AbstractSet[str]) -> RoundState:
    """Wait for no client that was lost before the restart, that was refused, or that must not be drawn."""
    waited_for = {client for client in present if not state.barred(client)}
    if state.policy.buffered:
        waited_for = _with_slots(state, waited_for)
    out = state.outstanding - waited_for
    if state.phase in BEFORE_MASKS:
        return replace(state, out=out, answered=state.answered - out)
    return replace(state, out=out)


def _with_slots(state: RoundState, clients: AbstractSet[str]) -> set[str]:
    """Those of some clients that have the slots of a run with a buffer. The ledger does not say who lost its slot.

    Work that did not fail comes first, and of that the latest: its client may have the slot of an earlier one.
    """

    def rank(client: str) -> tuple[bool, int, int, str]:
        work = state.work[client]
        return client in state.failed, -work.version, -work.attempt, client

    return set(sorted(clients & state.work.keys(), key=rank)[: state.policy.concurrency])


def with_evaluations(
    state: RoundState, evaluations: Sequence[Evaluation], earlier: Judged, missing: AbstractSet[Source]
) -> RoundState:
    """The state with what the evaluations so far say.

    Args:
        state: at the start of the round under way, or in it. `judged_from` is the round of the last extension.
        evaluations: of the source of the run's metric, from that round on.
        earlier: those of them that came before `evaluations`.
        missing: evaluations of the latest committed round that were due, and that the ledger does not have.
    """
    stop, judged, ending = state.policy.stop, earlier, state.ending
    if stop.uses_metrics and (reason := stop_reason(stop, evaluations, earlier)) is not None:
        # The crash came between an evaluation and the end of the run that it causes.
        return replace(state, phase=Phase.EVALUATING, ending=("completed", reason))
    for evaluation in sorted(evaluations, key=lambda entry: entry[0]):
        judged = judged.after(stop.criterion, evaluation)
    newest = max((round_ + 1 for round_, _ in evaluations), default=0)
    state = replace(state, judged=judged, judged_from=max(state.judged_from, newest))
    awaited = awaited_evaluations(state, state.round - 1) & missing if state.round else frozenset()
    if awaited and state.phase is Phase.SELECTING and ending is None:
        return replace(state, phase=Phase.EVALUATING, awaited=awaited)
    return state


def carry_on(state: RoundState, event: RoundRestored) -> Result:  # noqa: PLR0911 - a table
    """Continue after a restart, with what the crash cut short."""
    del event
    if state.phase is Phase.EVALUATING:
        if state.ending is None:
            return state, ()
        return ended(state, state.ending), (*cancel(state), EndRun(*state.ending))
    if state.phase is Phase.SELECTING:
        return go_on(state)
    if fault := training_diverges(state):
        return end_by_fault(state, fault)
    if state.phase in AFTER_MASKS and not state.accepted:
        return abandon(state, "the bytes of a masked update are torn or gone, after the list of survivors was sent")
    if state.lost and state.may_restart_states:
        return restart_round(state, lost_states(state), states=True)
    return close_if_done(state)
