"""Runs in lockstep on what stands for a GPU: their models, what their rounds wait for, and what is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import algorithms as fl
from fl_ops.simulate import held_states
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from tests import stand_in_gpu
from tests.fl_ops.simulate.conftest import Simulated
from tests.fl_ops.simulate.test_batched import BATCHED, UNEVEN, difference, run
from tests.marks import slow_except
from tests.stand_in_gpu import GPU, StandIn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in would replace a GPU")

ON_GPU = EngineOptions(batched=BatchedOptions(GPU, strategy="grouped"))
SECTIONS: dict[str, Any] = {**UNEVEN, "evaluation": {"every": 1, "batch_size": 8}}
LOSSES, NORMS = "algorithms/batched/client.py:_trained", "fl_ops/simulate/engines/held.py:sums_of_squares"
STEP, METRICS = "fl_server/aggregation/server_update.py:stats", "fl_tasks/evaluation.py:totals_of"
SUMS = "fl_server/aggregation/server_update.py:check_finite"
PLAN = "algorithms/tree.py:uploaded_together"
ROUND = {LOSSES: 1, NORMS: 1, STEP: 1, METRICS: 1}


@pytest.fixture
def core() -> Iterator[StandIn]:
    """The stand-in, in use."""
    with stand_in_gpu.in_use() as core:
        yield core


@pytest.mark.parametrize(
    ("method", "waits"),
    slow_except(
        [("fedavg", ROUND), ("fedsam", ROUND), ("scaffold", ROUND), ("mime", {**ROUND, NORMS: 2, SUMS: 1})],
        ("scaffold", ROUND),
    ),
)
def test_a_round_waits_for_losses_norms_the_server_step_and_metrics(
    simulated: Simulated, core: StandIn, method: str, waits: Mapping[str, int]
) -> None:
    """Each is one transfer for all clients of unequal steps. A round's plan is one upload, which is not waited for.

    The steps of all shapes and the evaluation are recorded, which waits for nothing. The model comes when it is asked.
    """
    with simulated(ON_GPU, **SECTIONS, algorithm={"name": method}) as simulation:
        found, plans = [], []
        for row in simulation.rounds():
            found.append(Counter(core.waits))
            plans.append([place for place in core.uploads if place.startswith("algorithms/batched") or place == PLAN])
            core.waits.clear()
            core.uploads.clear()
            assert row.digest is None
        assert found[1:] == [waits, waits]
        if method == "mime":  # its full gradients come batch by batch
            assert [plan.count(PLAN) for plan in plans[1:]] == [2, 2]
        else:
            assert plans[1:] == [[PLAN], [PLAN]]
        report = simulation.federation.engine_report
        assert "are recorded; the evaluation is a recorded step" in report
        assert "lockstep: groups of at most 64 clients: grouped; steps of" in report
        model = simulation.model()
    assert {*core.waits} == {"algorithms/tree.py:map"}
    assert {tensor.device.type for tensor in model.values()} == {"cpu"}


@pytest.mark.parametrize("method", slow_except(fl.names(), "fedcm"))
def test_the_model_is_that_of_a_cpu(simulated: Simulated, method: str) -> None:
    """Masked clients, states and momentum on the device, and recorded steps change roundings at most."""
    sections = {**SECTIONS, "algorithm": {"name": method}}
    expected = run(simulated, BATCHED, **sections)[1]
    with stand_in_gpu.in_use():
        assert difference(expected, run(simulated, ON_GPU, **sections)[1]) < 1e-5


def test_states_that_do_not_fit_are_in_pinned_memory(
    simulated: Simulated, core: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of SCAFFOLD's states are on the host then, and the model has the same bits."""
    sections = {**SECTIONS, "algorithm": {"name": "scaffold"}}
    expected = run(simulated, ON_GPU, **sections)[1]
    tables = "fl_ops/simulate/held_states.py:_made_for"
    assert not core.pinned.count(tables)
    monkeypatch.setattr(held_states, "free_bytes", lambda device: 0 if device.type == "cuda" else 1 << 30)
    found = run(simulated, ON_GPU, **sections)[1]
    assert core.pinned.count(tables) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
