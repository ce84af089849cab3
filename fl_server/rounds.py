"""The life of a run's rounds as a state machine without I/O: event in, (state, commands) out.

    SELECTING --draw--> COLLECTING --closes--> STEPPING --> COMMITTING --> (EVALUATING) --> SELECTING
                          |    ^                                                      '-> ENDED
                          |    '--reduced-- REDUCING <--closes, and the method has another exchange--.
                          '--------------------------------------------------------------------------'

    REDUCING, STEPPING --an update spoils the result--> COLLECTING, without that update

Two rules. All that decides what happens next in a run lives in `RoundState`; whoever drives it keeps no flags of its
own. And neither this file nor those with the rules knows a clock, store, network or tensor: what must be done is
returned as commands, in the order in which to do them, and what happened comes back as events.

A round closes at its goal; or when nobody outstanding can still deliver and the quorum holds; or at the deadline with
the quorum. Below quorum the next attempt keeps what was admitted (x_t has not moved, so it is still exact), lets
stragglers go on and draws replacements only. docs/round-states.md draws all transitions.
"""

from __future__ import annotations

from fl_server.events import (
    ClientBack,
    ClientOut,
    Committed,
    CulpritsFound,
    DeadlinePassed,
    EndRequested,
    Evaluated,
    Event,
    ExchangeReduced,
    Extended,
    PauseRequested,
    PickedUp,
    ResumeRequested,
    RetryDue,
    RosterChanged,
    StatesLost,
    Stepped,
    UpdateAdmitted,
)
from fl_server.round_collecting import (
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
from fl_server.round_committing import committed, evaluated, stepped
from fl_server.round_drawing import restart_states, restart_states_alone, restart_states_later
from fl_server.round_rule import Result, Rule, UnexpectedEvent
from fl_server.round_state import Phase, RoundState
from fl_server.round_steering import end_later, end_now, extend, go_on_after_failure, pause, reopen, resume, roster


def advance(state: RoundState, event: Event) -> Result:
    """Apply one event. An event that its phase has no rule for raises UnexpectedEvent and changes nothing."""
    rule = RULES.get((state.phase, type(event)))
    if rule is None:
        raise UnexpectedEvent(event, state)
    return rule(state, event)


_OPEN = [phase for phase in Phase if phase is not Phase.ENDED]
_STEPPING = (Phase.STEPPING, Phase.COMMITTING)
_COLLECTING = (Phase.SELECTING, Phase.COLLECTING)

RULES: dict[tuple[Phase, type], Rule] = {
    (Phase.SELECTING, RetryDue): retry,
    (Phase.SELECTING, ClientBack): client_returns,
    (Phase.SELECTING, UpdateAdmitted): admit_while_waiting,
    (Phase.COLLECTING, UpdateAdmitted): admit,
    (Phase.COLLECTING, PickedUp): picked_up,
    (Phase.COLLECTING, ClientOut): client_out,
    (Phase.COLLECTING, ClientBack): client_back,
    (Phase.COLLECTING, DeadlinePassed): deadline,
    (Phase.REDUCING, ExchangeReduced): next_exchange,
    (Phase.STEPPING, Stepped): stepped,
    (Phase.COMMITTING, Committed): committed,
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
    **{(phase, EndRequested): end_later if phase in _STEPPING else end_now for phase in _OPEN},
}
"""What each phase does about each event. A pair that is not here is refused."""
