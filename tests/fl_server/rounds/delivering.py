"""The events of a driver whose clients all deliver, for tests of any order of events."""

from __future__ import annotations

from fl_server.rounds.events import (
    Evaluated,
    Event,
    ExchangeReduced,
    Extended,
    ModelCommitted,
    ResumeRequested,
    RetryDue,
    StepComputed,
    UpdateAdmitted,
)
from fl_server.rounds.sampling import by_id
from fl_server.rounds.state import Phase, RoundState


def expected_next(state: RoundState) -> Event:
    """The next event of a driver whose clients all deliver."""
    if state.phase is Phase.COLLECTING:
        client = by_id(state.outstanding)[-1]
        return UpdateAdmitted(((client, client.encode()),))
    return {
        Phase.SELECTING: RetryDue() if state.goal else ResumeRequested(),
        Phase.REDUCING: ExchangeReduced(),
        Phase.STEPPING: StepComputed(),
        Phase.COMMITTING: ModelCommitted(),
        Phase.EVALUATING: Evaluated(min(state.awaited, default="server")),
        Phase.ENDED: Extended(state.rounds + 1),
    }[state.phase]
