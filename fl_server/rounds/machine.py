"""The life of a run's rounds as a state machine without I/O: event in, (state, effects) out.

    SELECTING --draw--> COLLECTING --closes--> STEPPING --> COMMITTING --> (EVALUATING) --> SELECTING
                          |    ^                                                      '-> ENDED
                          |    '--reduced-- REDUCING <--closes, and the method has another exchange--.
                          '--------------------------------------------------------------------------'

    REDUCING, STEPPING --an update makes the result unusable--> COLLECTING, without that update

With secure aggregation a round has more phases, and goes back to SELECTING where too few clients are left:

    SELECTING --draw--> AGREEING --keys--> (TOSSING) --> SHARING --shares--> COLLECTING --> SIGNING --> OPENING
                                                                                           STEPPING <--opened--'

Two rules hold. Everything that decides what happens next is in `RoundState`: who is drawn, asked again and refused,
when a round closes, when client states are reset, when the run ends and whether it has failed by its own fault. The
driver keeps no flags. And the package knows no clock, store, network or tensor: it returns effects in the order in
which to carry them out (`effects.py` has the contract), and what happened comes back as events.

A driver is a loop:

    state = restored(state, saved)                  # after a start; a new run begins with RoundState(policy, rounds)
    state, effects = advance(state, event)          # RoundRestored(), RosterChanged(...) first
    for effect in effects:
        ...                                         # write, act, send; then the next effect

The driver keeps the new state before it carries out the first effect, and processes no other event until it has
carried out the last one. The work of a phase answers with one event: REDUCING with ExchangeReduced, STEPPING with
StepComputed, either of them with CulpritsFound or ModelDiverged instead; COMMITTING with ModelCommitted; RetryLater
with RetryDue; an open attempt ends with DeadlinePassed after `policy.deadline_s`. An event may be out of date when its
turn comes, for it waited: `applies` tells, and the driver drops it. A synchronous driver (`fl simulate`)
never needs that.

With `close = "buffer"` clients deliver in all phases, and a commit ends nobody's work: see `buffer.py`. Its rules are
in the same table, in place of some others.

A round closes at its goal; or when no outstanding client can deliver and there is a quorum; or at the deadline with a
quorum. Below the quorum the next attempt keeps the admitted updates (x_t is unchanged, so they are still exact), lets
outstanding clients continue, and draws only replacements. docs/development/round-states.md shows all transitions.
"""

from __future__ import annotations

from collections.abc import Mapping

from fl_server.rounds import buffer, collecting, committing, ending, restoring, secure, selecting
from fl_server.rounds import events as ev
from fl_server.rounds.metrics import Judged
from fl_server.rounds.sampling import RoundPolicy, by_id
from fl_server.rounds.state import STAGES, Phase, Result, RoundState, Rule, UnexpectedEvent, replace


def roster(state: RoundState, event: ev.RosterChanged) -> Result:
    """Take the new list of eligible clients, and draw if the run waits for clients."""
    state = replace(state, eligible=by_id(event.eligible), settled=event.settled, shut_out=event.shut_out)
    return committing.go_on(state) if state.phase is Phase.SELECTING else (state, ())


def pause(state: RoundState, event: ev.PauseRequested) -> Result:
    """Start no new round."""
    del event
    return replace(state, paused=True), ()


def resume(state: RoundState, event: ev.ResumeRequested) -> Result:
    """Start new rounds again."""
    del event
    state = replace(state, paused=False)
    return selecting.select(state) if state.phase is Phase.SELECTING else (state, ())


def extend(state: RoundState, event: ev.Extended) -> Result:
    """Change the number of rounds and the limit of time. Earlier evaluations end the run no more."""
    if event.rounds <= state.round:
        raise UnexpectedEvent(event, state, f"expected more rounds than are done, {state.round}")
    return judged_anew(replace(state, rounds=event.rounds, wall_time_s=event.wall_time_s)), ()


def judged_anew(state: RoundState) -> RoundState:
    """Count evaluations for the stop rules from this round on."""
    return replace(state, judged=Judged(), judged_from=state.round)


def reopen(state: RoundState, event: ev.Extended) -> Result:
    """Reopen a completed run that gets more rounds."""
    if state.ending is None or state.ending[0] != "completed":
        raise UnexpectedEvent(event, state, "only a completed run can be extended")
    state, _ = extend(state, event)
    return _opened_again(state)


def go_on_after_failure(state: RoundState, event: ev.ResumeRequested) -> Result:
    """Resume a failed run from its last committed model."""
    if state.ending is None or state.ending[0] != "failed":
        raise UnexpectedEvent(event, state, "only a failed run can go on as it is")
    return _opened_again(judged_anew(replace(state, paused=False)))


def _opened_again(state: RoundState) -> Result:
    """Reopen an ended run. Its unfinished round is redrawn, because its clients were cancelled."""
    state = replace(state, ending=None, failed_by="")
    if not state.goal:
        return committing.go_on(state)
    state = selecting.redraw(state)
    restart = selecting.given_up(state, "the run had ended in it")
    state, effects = committing.go_on(state)
    return state, (restart, *effects)


def advance(state: RoundState, event: ev.Event) -> Result:
    """Apply one event. Raises UnexpectedEvent, and changes nothing, if the phase has no rule for it."""
    rule = rules(state.policy).get((state.phase, type(event)))
    if rule is None:
        raise UnexpectedEvent(event, state)
    return rule(state, event)


def rules(policy: RoundPolicy) -> Mapping[tuple[Phase, type], Rule]:
    """The rules of a run."""
    return BUFFERED_RULES if policy.buffered else RULES


def applies(event: ev.Event, state: RoundState) -> bool:  # noqa: PLR0911 - a table
    """Whether an event that has waited for its turn still means something: the round may have moved on since."""
    match event:
        case _ if (state.phase, type(event)) not in rules(state.policy) or state.phase is Phase.ENDED:
            return False
        case ev.UpdateAdmitted() if state.policy.buffered:
            return all(state.undecided(state.place_of(client), client) for client, _ in event.updates)
        case ev.UpdateAdmitted():
            return state.collects and all(
                client in state.drawn and not state.arrivals.has(client) for client, _ in event.updates
            )
        case ev.UpdateRefused(client):
            return client in state.drawn and state.undecided(state.place_of(client), client)
        case ev.ClientDroppedOut(client) | ev.WorkFailed(client) | ev.StateLost(client) | ev.ClientRestarted(client):
            return state.works(client)
        case ev.ClientReturned(client):
            return state.may_return(client)
        case ev.RetryDue():
            return state.goal > 0 or state.resting
        case ev.StageAnswered(client):
            return client in state.drawn and client not in state.answered
        case ev.StatesLost(_, epoch):
            return epoch in (None, state.state_epoch)
    return True


_OPEN = [phase for phase in Phase if phase is not Phase.ENDED]
_WORKING = (Phase.COLLECTING, *STAGES)
_COLLECTING = (Phase.SELECTING, *_WORKING)
_BUFFERED = [phase for phase in _OPEN if phase not in STAGES]

RULES: dict[tuple[Phase, type], Rule] = {
    (Phase.SELECTING, ev.RetryDue): collecting.retry,
    (Phase.SELECTING, ev.ClientReturned): collecting.client_returns,
    (Phase.SELECTING, ev.UpdateAdmitted): collecting.admit_while_waiting,
    (Phase.COLLECTING, ev.UpdateAdmitted): collecting.admit,
    **{(phase, ev.UpdateRefused): collecting.refuse for phase in (Phase.SELECTING, Phase.COLLECTING)},
    (Phase.SHARING, ev.GraphMade): secure.take_graph,
    **{(phase, ev.RoundSpoiled): secure.round_spoiled for phase in (*_WORKING, Phase.STEPPING)},
    (Phase.REDUCING, ev.ExchangeReduced): collecting.next_exchange,
    (Phase.STEPPING, ev.StepComputed): committing.stepped,
    (Phase.COMMITTING, ev.ModelCommitted): committing.committed,
    **{(phase, ev.StageAnswered): secure.stage_answered for phase in STAGES},
    **{(phase, ev.ClientDroppedOut): collecting.client_out for phase in _WORKING},
    **{(phase, ev.WorkFailed): collecting.work_failed for phase in _WORKING},
    **{(phase, ev.StateLost): collecting.state_lost for phase in _WORKING},
    **{(phase, ev.ClientRestarted): collecting.client_restarted for phase in _WORKING},
    **{(phase, ev.ClientReturned): collecting.client_back for phase in _WORKING},
    **{(phase, ev.DeadlinePassed): collecting.deadline for phase in _WORKING},
    (Phase.ENDED, ev.Extended): reopen,
    (Phase.ENDED, ev.ResumeRequested): go_on_after_failure,
    **{(phase, ev.CulpritsFound): collecting.drop_culprits for phase in (Phase.REDUCING, Phase.STEPPING)},
    **{(phase, ev.ModelDiverged): ending.diverged for phase in (Phase.REDUCING, Phase.STEPPING)},
    **{(phase, ev.RoundRestored): restoring.carry_on for phase in (*_COLLECTING, Phase.EVALUATING)},
    **{(phase, ev.RosterChanged): roster for phase in Phase},
    **{(phase, ev.PauseRequested): pause for phase in _OPEN},
    **{(phase, ev.ResumeRequested): resume for phase in _OPEN},
    **{(phase, ev.Extended): extend for phase in _OPEN},
    **{(phase, ev.Evaluated): committing.evaluated for phase in _OPEN},
    **{(phase, ev.TimeUsed): ending.time_used for phase in _OPEN},
    **{(phase, ev.ClientReleased): selecting.released for phase in _OPEN},
    **{(phase, ev.StatesLost): selecting.restart_states_later for phase in _OPEN},
    **{(phase, ev.StatesLost): selecting.restart_states for phase in _COLLECTING},
    (Phase.ENDED, ev.StatesLost): selecting.restart_states_alone,
    **{(phase, ev.EndRequested): ending.end for phase in _OPEN},
}
"""The rule of each phase for each event. A pair that is not in the table is refused."""

_IN_BUFFER: dict[tuple[Phase, type], Rule] = {
    **{(phase, ev.UpdateAdmitted): buffer.admit for phase in _BUFFERED},
    **{(phase, ev.UpdateRefused): collecting.refuse for phase in _BUFFERED},
    **{(phase, ev.ClientDroppedOut): collecting.client_out for phase in _BUFFERED},
    **{(phase, ev.WorkFailed): collecting.work_failed for phase in _BUFFERED},
    **{(phase, ev.StateLost): collecting.state_lost for phase in _BUFFERED},
    **{(phase, ev.ClientRestarted): collecting.client_restarted for phase in _BUFFERED},
    **{(phase, ev.ClientReturned): buffer.client_back for phase in _BUFFERED},
    **{(phase, ev.DeadlinePassed): buffer.deadline for phase in _BUFFERED},
    (Phase.COLLECTING, ev.RosterChanged): buffer.roster,
    (Phase.STEPPING, ev.CulpritsFound): buffer.drop_culprits,
}
BUFFERED_RULES: dict[tuple[Phase, type], Rule] = RULES | _IN_BUFFER
"""The same for a run with a buffer, whose clients work on in all phases."""
