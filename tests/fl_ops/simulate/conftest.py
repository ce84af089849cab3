"""A small run as a table, and the same done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fl_ops.simulate.clients import deal
from fl_ops.simulate.settings import parse_plan
from fl_ops.simulate.simulation import Simulation

RUN: dict[str, Any] = {
    "task": {"name": "points:Points"},
    "algorithm": {"name": "fedcm"},
    "local": {"learning_rate": 0.2, "batch_size": 8},
    "round": {"clients_per_round": 2},
    "stop": {"rounds": 3},
    "simulation": {"clients": 4, "names": "c{index}"},
}

Table = dict[str, Any]
Simulated = Callable[..., AbstractContextManager[Simulation]]


@pytest.fixture(autouse=True)
def _task_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of these tests can be imported."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def table() -> Callable[..., Table]:
    """The run with some sections changed, key by key."""

    def make(**sections: Any) -> Table:
        content = deepcopy(RUN)
        for name, value in sections.items():
            content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
        return content

    return make


@pytest.fixture
def simulated(table: Callable[..., Table]) -> Simulated:
    """A simulation of that run."""

    @contextmanager
    def make(**sections: Any) -> Iterator[Simulation]:
        plan = parse_plan(table(**sections))
        dealt = deal(plan, plan.config.seed)
        with Simulation(dealt.config, dealt.clients, task=dealt.evaluated) as simulation:
            yield simulation

    return make
