"""A run between two rounds: what decides all that follows, apart from its settings and the client states.

Its JSON values have all but the tensors, which are in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.system.clock import ClockPoint
from fl_ops.simulate.traffic import Name, Names, Offers
from fl_server.admission.norms import NormHistory
from fl_server.aggregation.snapshot import Snapshot
from fl_server.rounds.metrics import Judged, has_evaluation
from fl_server.rounds.restoring import with_evaluations
from fl_server.rounds.state import Phase, RoundState


@dataclass(frozen=True, slots=True)
class FederationPoint:
    """The models and the counters of a federation."""

    snapshot: Snapshot
    state_epoch: int
    norms: NormHistory
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


_KEPT = ("round", "over_selection", "ending", "failed_by")
"""Fields of a state that are saved as they are."""


def before_draw(state: RoundState) -> RoundState:
    """The state before the first draw of its round. It draws the same cohort again, as soon as it has a roster."""
    phase = state.phase if state.phase in (Phase.EVALUATING, Phase.ENDED) else Phase.SELECTING
    return RoundState(
        state.policy,
        state.rounds,
        phase=phase,
        members=state.members,
        awaited=state.awaited,
        wall_time_s=state.wall_time_s,
        draws=state.draws - (state.goal > 0 and phase is Phase.SELECTING),
        **{name: getattr(state, name) for name in _KEPT},
    )


def facts_of(point: RunPoint) -> dict[str, Any]:
    """All of a point but its snapshot and what the run's settings decide."""
    state, federation = point.state, point.federation
    return {
        "state": {
            **{name: getattr(state, name) for name in _KEPT},
            "phase": state.phase.value,
            "members": sorted(state.members),
            "awaited": sorted(state.awaited),
            "draws": state.draws,
        },
        "failures": list(point.failures),
        "seconds": point.seconds,
        "clock": None if point.clock is None else asdict(point.clock),
        "state_epoch": federation.state_epoch,
        "norms": federation.norms.to_text(),
        "held": _held_facts(federation.held),
        "offers": [[_name_facts(name), _name_facts(base), size] for name, (base, size) in federation.offers.items()],
    }


def point_of(facts: Mapping[str, Any], snapshot: Snapshot, first: RoundState) -> RunPoint:
    """The inverse of `facts_of`. first: the state in which a new run of the same settings begins."""
    values = facts["state"]
    sets = {name: frozenset(values[name]) for name in ("members", "awaited")}
    ending = None if values["ending"] is None else tuple(values["ending"])
    state = replace(first, **{**values, **sets, "phase": Phase(values["phase"]), "ending": ending})
    offers = {_name(name): (_name(base), size) for name, base, size in facts["offers"]}
    norms = NormHistory()
    norms.put_back(facts["norms"])
    federation = FederationPoint(snapshot, facts["state_epoch"], norms, _held(facts["held"]), offers)
    clock = None if facts["clock"] is None else ClockPoint(**facts["clock"])
    return RunPoint(federation, state, facts["failures"], facts["seconds"], clock)


def _held_facts(held: Mapping[str, Names]) -> dict[str, Any]:
    """Clients of one cohort share one value, so each value is written once."""
    places: dict[int, int] = {}
    distinct: list[Sequence[Any]] = []
    clients: list[list[str]] = []
    for client, names in held.items():
        if id(names) not in places:
            places[id(names)] = len(distinct)
            distinct.append([[*_name_facts(name), size] for name, size in names.items()])
            clients.append([])
        clients[places[id(names)]].append(client)
    return {"bundles": distinct, "clients": clients}


def _held(facts: Mapping[str, Any]) -> dict[str, Names]:
    held: dict[str, Names] = {}
    for bundles, clients in zip(facts["bundles"], facts["clients"], strict=True):
        names: Names = {_name(name): size for *name, size in bundles}
        held.update(dict.fromkeys(clients, names))
    return held


def _name_facts(name: Name) -> list[Any]:
    key, digest = name
    return [key, digest.hex()]


def _name(facts: Sequence[Any]) -> Name:
    key, digest = facts
    return (tuple(key) if isinstance(key, list) else key), bytes.fromhex(digest)


def judged(state: RoundState, earlier: Sequence[RoundResult]) -> RoundState:
    """The state with what the evaluations of earlier rounds say."""
    metric = state.policy.stop.criterion.metric
    evaluations = [(row.round, row.metrics) for row in earlier if has_evaluation(row.metrics, metric)]
    state = replace(state, metric_seen=any(metric in metrics for _, metrics in evaluations))
    return with_evaluations(state, evaluations, Judged(), frozenset())
