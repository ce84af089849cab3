"""A run between two rounds: what decides all that follows, apart from its settings and the client states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_ops.simulate.system.clock import ClockPoint
from fl_ops.simulate.traffic import Names, Offers
from fl_server.aggregation.snapshot import Snapshot
from fl_server.rounds.state import Phase, RoundState


@dataclass(frozen=True, slots=True)
class FederationPoint:
    """The models and the counters of a federation."""

    snapshot: Snapshot
    state_epoch: int
    norms: str
    """What the limits of norms follow from, as `NormHistory.to_text` writes it."""
    held: Mapping[str, Names]
    """The bundles that each client holds."""
    offers: Offers
    """The differences that are sent now."""


@dataclass(frozen=True, slots=True)
class RunPoint:
    """A run after a commit and its evaluation, or after its end."""

    federation: FederationPoint
    state: RoundState
    """See `before_draw`."""
    failures: Sequence[str]
    seconds: float
    """Time that the run has used."""
    clock: ClockPoint | None = None
    """Its simulated time, if it has any."""


def before_draw(state: RoundState) -> RoundState:
    """The state before the first draw of its round. It draws the same cohort again, as soon as it has a roster."""
    phase = state.phase if state.phase in (Phase.EVALUATING, Phase.ENDED) else Phase.SELECTING
    return RoundState(
        state.policy,
        state.rounds,
        round=state.round,
        phase=phase,
        members=state.members,
        over_selection=state.over_selection,
        awaited=state.awaited,
        ending=state.ending,
        failed_by=state.failed_by,
        wall_time_s=state.wall_time_s,
    )
