"""The built-in least squares: its optimum, its condition number, and its metrics in the last digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_tasks import PartitionSpec, Shard, TaskError, partition_task
from fl_tasks.built_in.least_squares import LeastSquares
from fl_tasks.evaluation import evaluate

OPTIONS: dict[str, Any] = {"dimension": 6, "clients": 4, "condition": 50.0}


def hessians(task: LeastSquares) -> list[torch.Tensor]:
    """A^T A / n of each client."""
    rows = [task.train_data(Shard(part)).inputs for part in partition_task(PartitionSpec("natural", 4), task)]
    return [a.T @ a / len(a) for a in rows]


def test_every_client_and_the_objective_have_the_condition_number() -> None:
    """Smoothness 1 and strong convexity 1 / condition, with other curvatures between in each client."""
    own = hessians(LeastSquares(**OPTIONS))
    for hessian in [*own, torch.stack(own).mean(dim=0)]:
        curvatures = torch.linalg.eigvalsh(hessian)
        torch.testing.assert_close(curvatures[[0, -1]], torch.tensor([1 / 50, 1.0], dtype=torch.float64))
    assert len({round(hessian.trace().item(), 9) for hessian in own}) == 4


def test_gap_is_the_loss_over_its_minimum() -> None:
    """At any point gap = loss - the least loss; at the optimum the gradient, the gap and the distance are 0."""
    task = LeastSquares(**OPTIONS)
    data, model = task.train_data(Shard()), task.model()
    best = torch.linalg.lstsq(data.inputs, data.targets[:, None]).solution[:, 0]
    start = evaluate(task, model, task.eval_data())
    with torch.no_grad():
        model.x.copy_(best)
    end = evaluate(task, model, task.eval_data())
    assert end["gap"] == pytest.approx(0, abs=1e-25)
    assert end["distance"] == pytest.approx(0, abs=1e-12)
    assert start["gap"] == pytest.approx(start["loss"] - end["loss"], abs=1e-12)
    assert start["distance"] == pytest.approx(best.norm().item(), abs=1e-12)
    model.zero_grad()
    task.loss(model(data.inputs), data.targets).backward()
    assert model.x.grad is not None
    assert model.x.grad.norm() < 1e-13


def test_without_heterogeneity_the_clients_share_their_optimum() -> None:
    """At the optimum no client has a loss; with heterogeneity it has one."""
    for heterogeneity, shared in ((0.0, True), (1.0, False)):
        task = LeastSquares(**OPTIONS, heterogeneity=heterogeneity)
        data = task.train_data(Shard())
        best = torch.linalg.lstsq(data.inputs, data.targets[:, None]).solution[:, 0]
        assert ((data.inputs @ best - data.targets).abs().max() < 1e-10) == shared


def test_the_seed_makes_the_problem() -> None:
    """Equal options give equal examples, another seed others."""
    one, same, other = (LeastSquares(**OPTIONS, seed=seed).train_data(Shard()) for seed in (3, 3, 4))
    assert torch.equal(one.inputs, same.inputs)
    assert torch.equal(one.targets, same.targets)
    assert not torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimension": 1}, "dimension to be a whole number of 2 or more, got 1"),
        ({"clients": 2.5}, "clients to be a whole number of 1 or more, got 2.5"),
        ({"condition": 0.5}, "condition to be a number of 1 or more, got 0.5"),
        ({"heterogeneity": -1}, "heterogeneity to be a number of 0 or more, got -1"),
        ({"seed": True}, "seed to be a whole number of 0 or more, got True"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    """The error has the option, what is allowed and what came."""
    with pytest.raises(TaskError, match=message):
        LeastSquares(**options)
