"""Simulated runs with a buffer: who is in a step, when, from which version, and the bits of the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.reports import RoundResult
from fl_server.errors import InvalidInput
from tests.fl_ops.simulate.conftest import Simulated
from tests.marks import slow_except

MODEL = 60
"""Bytes."""
ALL = {"clients_per_round": 2, "close": "buffer", "goal": 4, "deadline_s": 1e6}
TWO = {**ALL, "goal": 2, "concurrency": 4}
LOGNORMAL = {"distribution": "lognormal", "median": 10, "sigma": 1.5}
"""Speeds, in gradients a second."""

Run = Callable[..., list[RoundResult]]


@pytest.fixture
def run(simulated: Simulated) -> Run:
    """All rounds of a run with this [simulation.system]; None: without one."""

    def make(
        section: dict[str, Any], system: dict[str, Any] | None, engine: EngineOptions = SEQUENTIAL, **sections: Any
    ) -> list[RoundResult]:
        simulation = {} if system is None else {"system": system}
        with simulated(engine, round=section, simulation=simulation, **sections) as it:
            return list(it.rounds())

    return make


@pytest.fixture
def four(tmp_path: Path) -> dict[str, Any]:
    """Four devices that need 4 + 30 / speed seconds for an update: 34, 7, 14 and 10 s."""
    path = tmp_path / "devices.csv"
    path.write_text("client,speed\nc0,1\nc1,10\nc2,3\nc3,5\n")
    return {"speed": {"file": str(path), "column": "speed"}, "down": MODEL, "up": MODEL / 2, "latency_s": 1}


def test_clients_work_on_while_the_server_steps(run: Run, four: dict[str, Any]) -> None:
    """c1 and c3 after 7 and 10 s; c2's version 0 after 14 s with c1's version 1 after 17; c3 after 20, c1 after 24."""
    rounds = run(TWO, four, algorithm={"name": "fedavg"})
    assert [(done.accepted, done.versions) for done in rounds] == [
        (("c1", "c3"), (0, 0)), (("c2", "c1"), (0, 1)), (("c3", "c1"), (1, 2)),
    ]  # fmt: skip
    assert [done.simulated_total_s for done in rounds] == [pytest.approx(at) for at in (10, 17, 24)]
    assert [(done.bytes_down, done.bytes_up) for done in rounds] == [(2 * MODEL, 2 * MODEL)] * 3


@pytest.mark.parametrize("algorithm", slow_except(["fedavg", "fedcm", "mimelite", "fedadam"], "fedcm"))
def test_without_staleness_the_models_are_those_of_cohorts(run: Run, algorithm: str) -> None:
    """A goal of all four clients: nobody can begin again before all have delivered. The same bits, also of bytes."""
    sections = {"algorithm": {"name": algorithm}, "local": {"learning_rate_decay": 0.9}}
    buffered = run(ALL, {"speed": LOGNORMAL}, **sections)
    cohorts = run({"clients_per_round": 4, "deadline_s": 1e6}, {"speed": LOGNORMAL}, **sections)
    same: dict[str, Any] = {"seconds": 0.0, "versions": (), "accepted": ()}
    assert [replace(one, **same) for one in buffered] == [replace(one, **same) for one in cohorts]
    assert [sorted(one.accepted) for one in buffered] == [list(one.accepted) for one in cohorts]


def test_the_order_of_arrival_is_drawn_without_devices(run: Run) -> None:
    """Without simulated time each client at work is as likely to arrive next; some updates are stale."""
    rounds = run(TWO, None, stop={"rounds": 12})
    stale = [done.round - version for done in rounds for version in done.versions]
    assert len(stale) == 24
    assert 0 < sum(stale) / 24 < 3
    assert rounds[-1].digest == run(TWO, None, stop={"rounds": 12})[-1].digest


@pytest.mark.parametrize("system", [None, {"speed": LOGNORMAL, "drop_out": 0.2}], ids=["drawn", "devices"])
def test_workers_change_no_bit(run: Run, system: dict[str, Any] | None) -> None:
    """Clients that are trained by two processes: the same models."""
    one, other = (run(TWO, system, engine, stop={"rounds": 5}) for engine in (SEQUENTIAL, EngineOptions(workers=2)))
    assert [done.digest for done in one] == [done.digest for done in other]


def test_stale_updates_are_decoded_by_their_own_version(simulated: Simulated) -> None:
    """EDEN's rotation depends on the round: with another round's signs a stale delta would be noise."""
    models = []
    for encodings in ({}, {"update": "eden4", "direction": "int8"}):
        with simulated(round=TWO, stop={"rounds": 8}, encodings=encodings) as it:
            stale = [done.round - version for done in it.rounds() for version in done.versions]
            models.append(torch.cat([tensor.flatten() for tensor in it.model().values()]))
            first = torch.cat([tensor.flatten() for tensor in it.federation.engine.first().state.x.values()])
        assert max(stale) > 0
    plain, encoded = models
    assert (encoded - plain).norm() < 0.2 * (plain - first).norm()


def test_an_update_that_is_too_stale_does_not_count(run: Run, four: dict[str, Any]) -> None:
    """c0 needs 34 s, three steps at least; with max_staleness = 1 its work is cancelled, and it begins anew."""
    rounds = run({**TWO, "max_staleness": 1}, four, stop={"rounds": 12})
    assert max(done.round - version for done in rounds for version in done.versions) == 1
    assert not any("c0" in done.accepted for done in rounds)
    patient = run(TWO, four, stop={"rounds": 12})
    assert any("c0" in done.accepted for done in patient)


def test_a_late_client_begins_again(run: Run, four: dict[str, Any]) -> None:
    """The deadline of 20 s frees c0's slot, and c0 is the only idle client: it never comes to its 34 s."""
    rounds = run({**TWO, "deadline_s": 20}, four, stop={"rounds": 12})
    assert (rounds[-1].simulated_total_s or 0) > 40
    assert not any("c0" in done.accepted for done in rounds)
    assert sum(done.bytes_down for done in rounds) > 24 * MODEL


def test_a_late_client_may_fail(simulated: Simulated, four: dict[str, Any]) -> None:
    """All are late after 1 s and fail later, when their slots are free: nothing follows, until the time is over."""
    sections = {"local": {"learning_rate": 3e38, "weight_decay": 10.0}, "stop": {"wall_time_s": 60.0}}
    with simulated(round={**TWO, "deadline_s": 1}, simulation={"system": four}, **sections) as simulation:
        assert list(simulation.rounds()) == []
        assert simulation.ending == ("completed", "its 60 s are over")
        assert any("c2" in failure for failure in simulation.failures)


def test_drop_outs_are_drawn_again(run: Run) -> None:
    """Half of all work comes to nothing; the run has all of its steps, and counts what was lost."""
    rounds = run(TWO, {"speed": 10, "drop_out": 0.5}, stop={"rounds": 20})
    assert len(rounds) == 20
    assert sum(done.dropped for done in rounds) > 10


def test_clients_in_lockstep_are_refused(simulated: Simulated) -> None:
    """They train together, and clients of a buffer begin at any time."""
    engine = EngineOptions(batched=BatchedOptions())
    with pytest.raises(InvalidInput, match="one at a time"), simulated(engine, round=TWO):
        pass
