"""The life of a run's rounds as a state machine without I/O: event in, (state, commands) out.

    SELECTING --draw--> COLLECTING --closes--> STEPPING --> COMMITTING --> (EVALUATING) --> SELECTING
                          |    ^                                                      '-> ENDED
                          |    '--reduced-- REDUCING <--closes, and the method has another exchange--.
                          '--------------------------------------------------------------------------'

    REDUCING, STEPPING --an update makes the result unusable--> COLLECTING, without that update

Two rules hold. Everything that decides what happens next is in `RoundState`; the driver keeps no flags of its own. And
the package knows no clock, store, network or tensor: it returns commands in the order in which to carry them out, and
what happened comes back as events.

A round closes at its goal; or when no outstanding client can deliver and there is a quorum; or at the deadline with a
quorum. Below the quorum the next attempt keeps the admitted updates (x_t is unchanged, so they are still exact), lets
outstanding clients continue, and draws only replacements. docs/development/round-states.md shows all transitions.
"""

from __future__ import annotations

from fl_server.rounds.collecting import (
    admit,
    admit_while_waiting,
    client_back,
    client_out,
    client_returns,
    deadline,
    drop_culprits,
    next_exchange,
    picked_up,
    retry,
)
from fl_server.rounds.committing import committed, evaluated, stepped
from fl_server.rounds.control import (
    end_after_commit,
    end_later,
    end_now,
    extend,
    go_on_after_failure,
    pause,
    reopen,
    resume,
    roster,
)
from fl_server.rounds.events import (
    ClientDroppedOut,
    ClientReturned,
    CulpritsFound,
    DeadlinePassed,
    EndRequested,
    Evaluated,
    Event,
    ExchangeReduced,
    Extended,
    ModelCommitted,
    PauseRequested,
    ResumeRequested,
    RetryDue,
    RosterChanged,
    RoundRestored,
    StatesLost,
    StepComputed,
    UpdateAdmitted,
)
from fl_server.rounds.selecting import restart_states, restart_states_alone, restart_states_later
from fl_server.rounds.state import Phase, Result, RoundState, Rule, UnexpectedEvent


def advance(state: RoundState, event: Event) -> Result:
    """Apply one event. Raises UnexpectedEvent, and changes nothing, if the phase has no rule for it."""
    rule = RULES.get((state.phase, type(event)))
    if rule is None:
        raise UnexpectedEvent(event, state)
    return rule(state, event)


_OPEN = [phase for phase in Phase if phase is not Phase.ENDED]
_COLLECTING = (Phase.SELECTING, Phase.COLLECTING)

RULES: dict[tuple[Phase, type], Rule] = {
    (Phase.SELECTING, RetryDue): retry,
    (Phase.SELECTING, ClientReturned): client_returns,
    (Phase.SELECTING, UpdateAdmitted): admit_while_waiting,
    (Phase.COLLECTING, UpdateAdmitted): admit,
    (Phase.COLLECTING, RoundRestored): picked_up,
    (Phase.COLLECTING, ClientDroppedOut): client_out,
    (Phase.COLLECTING, ClientReturned): client_back,
    (Phase.COLLECTING, DeadlinePassed): deadline,
    (Phase.REDUCING, ExchangeReduced): next_exchange,
    (Phase.STEPPING, StepComputed): stepped,
    (Phase.COMMITTING, ModelCommitted): committed,
    (Phase.EVALUATING, Evaluated): evaluated,
    (Phase.ENDED, Extended): reopen,
    (Phase.ENDED, ResumeRequested): go_on_after_failure,
    (Phase.REDUCING, CulpritsFound): drop_culprits,
    (Phase.STEPPING, CulpritsFound): drop_culprits,
    **{(phase, RosterChanged): roster for phase in Phase},
    **{(phase, PauseRequested): pause for phase in _OPEN},
    **{(phase, ResumeRequested): resume for phase in _OPEN},
    **{(phase, Extended): extend for phase in _OPEN},
    **{(phase, StatesLost): restart_states if phase in _COLLECTING else restart_states_later for phase in _OPEN},
    (Phase.ENDED, StatesLost): restart_states_alone,
    **{(phase, EndRequested): end_now for phase in _OPEN},
    (Phase.STEPPING, EndRequested): end_later,
    (Phase.COMMITTING, EndRequested): end_after_commit,
}
"""The rule of each phase for each event. A pair that is not in the table is refused."""
