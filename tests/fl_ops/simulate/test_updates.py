"""Admission of the updates of clients in lockstep."""

from __future__ import annotations

from typing import Any

import pytest

from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_server.rounds import events as ev
from tests.fl_ops.simulate.conftest import Simulated

TOGETHER = EngineOptions(batched=BatchedOptions(strategy="grouped", group=4))
UNEVEN: dict[str, Any] = {
    "algorithm": {"name": "fedavg"},
    "round": {"clients_per_round": 4, "quorum": 1},
    "simulation": {"clients": 6, "partition": {"method": "dirichlet", "alpha": 0.6}},
    "stop": {"rounds": 1},
}


def test_some_of_a_group_are_refused_as_they_are_alone(simulated: Simulated) -> None:
    """Clients of different sizes, of which some move too far: the same count, and the refusals have the same words."""
    with simulated(**UNEVEN) as simulation:
        simulation.federation.discard_round = lambda: None  # type: ignore[method-assign]
        list(simulation.rounds())
        norms = sorted(one.norms["delta"] for one in simulation.federation._contributions.values())
    limited = {**UNEVEN, "round": {**UNEVEN["round"], "max_update_norm": (norms[1] + norms[2]) / 2}}
    ends = []
    for engine in (SEQUENTIAL, TOGETHER):
        with simulated(engine, **limited) as simulation:
            [done] = simulation.rounds()
            ends.append((done.accepted, done.bytes_up, simulation.failures))
    assert ends[0] == ends[1]
    assert (len(ends[0][0]) >= 2, len(ends[0][2]) >= 2) == (True, True)
    assert "expected an update of norm" in ends[0][2][0]


def test_a_group_is_one_event_of_the_core(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """All updates of a group that arrive one after the other are admitted by one event."""
    with simulated(TOGETHER, **UNEVEN) as simulation:
        apply, events = simulation._apply, list[ev.Event]()

        def recorded(event: ev.Event) -> None:
            events.append(event)
            apply(event)

        monkeypatch.setattr(simulation, "_apply", recorded)
        [done] = simulation.rounds()
    [admitted] = [event for event in events if isinstance(event, ev.UpdateAdmitted)]
    assert sorted(client for client, _ in admitted.updates) == sorted(done.accepted)
