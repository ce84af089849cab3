"""The same faults of clients end a coordinator's run and a simulated one at the same point, for the same reason."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from fl_ops.simulate.simulation import Simulation
from fl_ops.simulate.updates import NotDelivered
from fl_server.rounds.events import Fault, RetryDue
from fl_server.rounds.sampling import by_id
from fl_server.rounds.state import Phase, RoundState
from fl_server.run.failures import Reason
from fl_server.run.run import Run
from fl_server.run.status import why_waiting
from fl_server.store.records import UpdateRecord
from protos.fl.v1.training_pb2 import ExchangeKey, UpdateHeader
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

CLIENTS = [f"c{index}" for index in range(5)]
SECTIONS: dict[str, Any] = {"seed": 3, "round": {"clients_per_round": 2}, "stop": {"rounds": 2}}
WHY = "expected less, got more"
NAN = Reason("loss nan", not_finite=True)
BUG = Reason("KeyError: 'age'", "KeyError (task.py, line 3)")
REFUSED: dict[Fault, str] = {
    "not_finite": "REFUSAL_REASON_NOT_FINITE",
    "norm": "REFUSAL_REASON_NORM",
    "layout": "REFUSAL_REASON_LAYOUT",
    "": "REFUSAL_REASON_SIZE",
}


async def take(run: Run, client: str, fault: Reason | Fault) -> None:
    """The coordinator takes a client's failure, or the refusal of its update."""
    key = ExchangeKey(run_id=run.id, round=run.state.round, exchange=run.state.exchange)
    if isinstance(fault, Reason):
        await run.submissions.client_failed(key, client, fault)
        return
    reason = REFUSED[fault]
    record = UpdateRecord(run.id, key.round, key.exchange, client, b"", 0, admitted=False, reason=reason, detail=WHY)
    await run.submissions.record_verdict(record, UpdateHeader(key=key))


async def online(folder: Path, fault: Reason | Fault, *, retried: bool = False) -> RoundState:
    """The state of a coordinator's run in which every client has this fault, once it ends or waits.

    retried: after the wait.
    """
    async with World(folder) as world:
        for name in CLIENTS:
            await Device(name, works=False).connect(world)
        run = await world.create(**SECTIONS)
        await until(lambda: run.state.phase is Phase.COLLECTING, "the cohort is drawn")
        while run.state.phase is Phase.COLLECTING:
            await take(run, by_id(run.state.outstanding)[0], fault)
        if retried:
            assert f"5 refused in this round, first c0: {WHY}; `fl clients show c0` " in why_waiting(run.context, run)
            run.post(RetryDue())
            await until(lambda: run.state.phase is not Phase.SELECTING, "the wait is over")
        return run.state


def offline(simulated: Any, monkeypatch: pytest.MonkeyPatch, fault: Reason | Fault) -> RoundState:
    """The state of the same run when it is simulated."""

    def result(state: RoundState, client: str) -> NotDelivered:
        del state
        if isinstance(fault, Reason):
            return NotDelivered(client, fault.why, fault.not_finite, cause=fault.cause)
        return NotDelivered(client, WHY, fault == "not_finite", refused=True, fault=fault)

    run: AbstractContextManager[Simulation] = simulated(
        algorithm={"name": "fedavg"}, simulation={"clients": len(CLIENTS)}, **SECTIONS
    )
    with run as simulation:
        monkeypatch.setattr(simulation._collection, "result", result)
        monkeypatch.setattr(simulation._collection, "next_client", lambda state: by_id(state.outstanding)[0])
        assert list(simulation.rounds()) == []
        return simulation._state


@pytest.mark.parametrize(
    ("fault", "failed_by", "asked"),
    [
        (NAN, "not_finite", 2),
        ("not_finite", "not_finite", 2),
        ("norm", "norm", 5),
        ("layout", "layout", 5),
        (BUG, "task", 4),
    ],
    ids=["nan", "nan-sent", "norms", "layouts", "task"],
)
async def test_a_fault_of_all_clients_ends_both_runs(
    tmp_path: Path, simulated: Any, monkeypatch: pytest.MonkeyPatch, fault: Reason | Fault, failed_by: str, asked: int
) -> None:
    """Both ask the same clients and end with the same reason."""
    here, there = await online(tmp_path, fault), offline(simulated, monkeypatch, fault)
    assert here.failed_by == failed_by
    assert len(here.drawn) == asked
    assert (there.failed_by, there.drawn, there.attempt) == (here.failed_by, here.drawn, here.attempt)
    assert there.ending == here.ending


async def test_other_failures_end_a_simulation_and_are_tried_again_by_a_coordinator(
    tmp_path: Path, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have asked everybody. A coordinator asks again later; a simulated client would fail in the same way."""
    failure = Reason("no memory")
    here, there = await online(tmp_path, failure), offline(simulated, monkeypatch, failure)
    assert here.drawn == there.drawn == set(CLIENTS)
    assert (here.phase, here.ending) == (Phase.SELECTING, None)
    assert there.ending is not None
    assert there.ending[1].startswith("too few clients could deliver; the last one that could not: ")


async def test_refused_clients_end_a_simulation_and_are_drawn_again_by_a_coordinator(
    tmp_path: Path, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have asked everybody, for reasons that are no fault of the run. A coordinator says so, and redraws."""
    here, there = await online(tmp_path / "waits", ""), offline(simulated, monkeypatch, "")
    assert here.refused.keys() == there.refused.keys() == set(CLIENTS)
    assert (here.phase, here.ending) == (Phase.SELECTING, None)
    assert there.ending is not None
    assert there.ending[1].startswith("too few clients could deliver; the last one that could not: ")
    after = await online(tmp_path / "goes on", "", retried=True)
    assert (after.phase, after.round, after.refused, len(after.outstanding)) == (Phase.COLLECTING, 0, {}, 2)
