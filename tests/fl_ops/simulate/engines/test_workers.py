"""The workers engine: the same bits as the sequential engine, and no process is left however a run ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import algorithms as fl
from fl_ops.errors import Refused
from fl_ops.simulate.engine_choice import SEQUENTIAL, EngineOptions
from fl_ops.simulate.engines.engine import EvaluationPart, Part, PartResult, SumPart
from fl_ops.simulate.engines.workers import WorkersEngine
from fl_ops.simulate.reports import RoundResult
from fl_tasks import Examples, TaskError
from tests.fl_ops.points import Points
from tests.fl_ops.simulate.conftest import Simulated
from tests.marks import slow_except

Rounds = list[RoundResult]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kinds of parts that workers did for the server. Sums are shared however small they are."""
    monkeypatch.setattr("fl_ops.simulate.shared_work.LEAST_BYTES", 0)
    done: list[type] = []
    share = WorkersEngine.share

    def watched(self: WorkersEngine, parts: Sequence[Part]) -> list[PartResult] | None:
        results = share(self, parts)
        done.extend(type(part) for part in parts if results is not None)
        return results

    monkeypatch.setattr(WorkersEngine, "share", watched)
    return done


def rounds_of(simulated: Simulated, engine: EngineOptions, **sections: Any) -> tuple[Rounds, list[str]]:
    """The rounds without their times, and the failures of clients."""
    with simulated(engine=engine, **sections) as simulation:
        rounds = [replace(done, seconds=0.0) for done in simulation.rounds()]
        return rounds, simulation.failures


def children() -> set[int | None]:
    """Processes that this one started and that run."""
    return {process.pid for process in multiprocessing.active_children()}


@pytest.mark.parametrize("method", slow_except(fl.names(), "scaffold"))
def test_every_method_has_the_same_bits(simulated: Simulated, method: str, shared: list[type]) -> None:
    """One, two and three workers: equal models, losses, metrics and bytes in four rounds, with client states.

    Workers share sums and evaluations, too.
    """
    sections: dict[str, Any] = {
        "algorithm": {"name": method},
        "population": 4 if fl.build(method).needs_population else 0,
        "round": {"clients_per_round": 3, "clip_update_norm": 0.2},
        "stop": {"rounds": 4},
        "evaluation": {"batch_size": 5},
    }
    expected, _ = rounds_of(simulated, SEQUENTIAL, **sections)
    assert len({done.digest for done in expected}) == 4
    for workers in (2, 3):
        shared.clear()
        assert rounds_of(simulated, EngineOptions(workers), **sections)[0] == expected
        assert shared.count(EvaluationPart) == 4 * workers
        assert shared.count(SumPart) >= 4


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {"task": {"options": {"part": 0.25}}, "evaluation": {"clients_every": 1}},
            id="evaluation-on-clients",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "task": {"options": {"part": 0.25}},
                "averaging": {"method": "ema", "decay": 0.5},
                "evaluation": {"clients_every": 2, "averaged_on_clients": True},
            },
            id="averaged-on-clients",
        ),
        pytest.param(
            {"round": {"clients_per_round": 3, "reducer": "median", "quorum": 3}}, id="median", marks=pytest.mark.slow
        ),
        pytest.param(
            {"round": {"close": "goal", "over_selection": 1.5}, "stop": {"rounds": 10}},
            id="first-arrivals",
            marks=pytest.mark.slow,
        ),
        pytest.param({"round": {"sampling": "bernoulli", "rate": 0.5}}, id="bernoulli", marks=pytest.mark.slow),
        pytest.param({"personal": ["bias"], "task": {"options": {"part": 0.25}}}, id="personal"),
        pytest.param(
            {"simulation": {"partition": {"method": "dirichlet", "alpha": 0.5}}},
            id="sizes-differ",
            marks=pytest.mark.slow,
        ),
        pytest.param({"task": {"name": "points:NormedPoints"}}, id="buffers-and-dropout"),
        pytest.param(
            {"algorithm": {"name": "fedavg"}, "local": {"optimizer": {"name": "adam"}, "learning_rate": 0.01}},
            id="adam",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.usefixtures("shared")
def test_other_settings_have_the_same_bits(simulated: Simulated, sections: dict[str, Any]) -> None:
    """Reducers that read each update, over-selection, evaluation on clients and personal parameters."""
    expected, _ = rounds_of(simulated, SEQUENTIAL, **sections)
    assert expected
    assert rounds_of(simulated, EngineOptions(3), **sections)[0] == expected


def test_metrics_from_sums_have_the_same_bits(simulated: Simulated, shared: list[type]) -> None:
    """F1, recall of each class and perplexity, on the server's data in parts and over clients in two processes."""
    sections: dict[str, Any] = {
        "task": {"name": "tests.processes.scored_task:Scored", "options": {"kept": 10}},
        "evaluation": {"clients_every": 1, "batch_size": 7},
        "stop": {"rounds": 2},
    }
    expected, _ = rounds_of(simulated, SEQUENTIAL, **sections)
    assert {"f1_macro", "recalls/2", "perplexity", "clients_f1_macro", "clients_perplexity"} <= set(expected[0].metrics)
    assert rounds_of(simulated, EngineOptions(2), **sections)[0] == expected
    assert shared.count(EvaluationPart) == 4


class _OnExamples(Points):
    """Does something when it sees an example that is far from all others."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if bool((target == 2).all()):
            self.seen()
        return super().loss(output, target)

    def seen(self) -> None:
        raise RuntimeError("the sensor is unplugged")


class _Killed(_OnExamples):
    def seen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def special(simulated: Simulated, task: Points) -> dict[str, Any]:
    """The client c2 with a task and examples of class 2 only."""
    with simulated() as simulation:
        local = simulation.federation.clients["c2"]
    train = Examples(torch.ones(8, 4), torch.full((8,), 2))
    return {"c2": replace(local, task=task, train=train)}


def test_a_clients_error_is_the_one_of_the_sequential_engine(simulated: Simulated) -> None:
    """The task of one client raises in training. Rounds, failures and their texts are equal."""
    sections = {"round": {"clients_per_round": 4, "quorum": 2}, "replaced": special(simulated, _OnExamples())}
    expected = rounds_of(simulated, SEQUENTIAL, **sections)
    assert "the sensor is unplugged" in expected[1][0]
    assert rounds_of(simulated, EngineOptions(2), **sections) == expected


def test_a_worker_that_is_killed_ends_the_run_with_its_clients_name(simulated: Simulated) -> None:
    """As by the kernel when memory is short: an error that names client, signal and remedy; no process is left."""
    before = children()
    with pytest.raises(Refused, match=r"work of c2 ended unexpectedly \(SIGKILL\).*fewer --workers"):
        rounds_of(simulated, EngineOptions(2), round={"clients_per_round": 4}, replaced=special(simulated, _Killed()))
    assert children() == before


def test_a_model_that_cannot_be_made_is_reported_before_a_process_is_started(simulated: Simulated) -> None:
    """The error is that of the sequential engine."""
    before = children()
    errors = []
    for engine in (SEQUENTIAL, EngineOptions(2)):
        with (
            pytest.raises(TaskError) as caught,
            simulated(engine=engine, task={"name": "faulty:Faulty", "options": {"where": "model"}}),
        ):
            pass
        errors.append(str(caught.value))
    assert (errors[0], children()) == (errors[1], before)


def test_nothing_is_left(simulated: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of updates, states and bundles and all processes are gone after a run that was left in mid-round."""
    monkeypatch.setattr("fl_ops.simulate.run_files.MEMORY_DISK", tmp_path)
    before = children()
    with simulated(engine=EngineOptions(2), algorithm={"name": "scaffold"}, population=4) as simulation:
        next(simulation.rounds())
        assert len(list(tmp_path.iterdir())) == 2
        assert len(children() - before) == 2
    assert list(tmp_path.iterdir()) == []
    assert children() == before
