"""Evaluations as one recorded step: on a CPU a list of operations, on CUDA a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl
from algorithms.batched.recording import NotRecorded
from fl_server.aggregation import evaluation
from fl_server.aggregation.evaluation import EvaluatedModel, RecordedEvaluation
from fl_tasks import Examples
from fl_tasks.evaluation import evaluate, finished, totals_of
from fl_tasks.metrics import Metric

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
EXAMPLES, BATCH = 70, 16


class Images:
    """A small network with convolutions, batch norm and dropout, on images that are kept as bytes."""

    def __init__(self, extra: Callable[[Tensor], Tensor] = torch.zeros_like) -> None:
        """extra: losses -> another metric of the examples."""
        self._extra = extra

    def model(self) -> nn.Module:
        """Five layers."""
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(4 * 36, 5)
        return nn.Sequential(*layers)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(output, target)

    def eval_data(self, shard: object = None) -> Examples:
        """Random images."""
        del shard
        random = torch.Generator().manual_seed(0)
        images = torch.randint(256, (EXAMPLES, 3, 8, 8), generator=random).to(torch.uint8)
        return Examples(images, torch.randint(5, (EXAMPLES,), generator=random), prepare=lambda it: it / 255)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Loss, accuracy and another one."""
        losses = nn.functional.cross_entropy(output, target, reduction="none")
        return {"loss": losses, "accuracy": (output.argmax(1) == target).float(), "extra": self._extra(losses)}


class WithSums(Images):
    """The same, with a metric that is computed from sums."""

    declared_metrics = (
        Metric(
            "zeros",
            sums=lambda output, target: {"zeros": (target == 0).sum(), "all": torch.ones_like(target).sum()},
            value=lambda sums: float(sums["zeros"] / sums["all"]),
        ),
    )


def values_of(seed: int, task: Any) -> fl.ModelState:
    """Parameters and running statistics."""
    torch.manual_seed(seed)
    model = task.model()
    parameters = {name: torch.rand_like(tensor) for name, tensor in model.named_parameters()}
    buffers = {
        name: torch.rand_like(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in model.named_buffers()
    }
    return fl.ModelState(parameters, buffers, {})


@pytest.mark.parametrize("task", [Images(), WithSums()], ids=["means", "sums"])
def test_a_recorded_evaluation_has_the_bits_of_one_batch_by_batch(task: Any) -> None:
    """With other values of the model each time, and a last batch that is shorter."""
    model, data = task.model(), task.eval_data()
    recorded = RecordedEvaluation(task, model, data, BATCH)
    for seed in range(3):
        values = values_of(seed, task)
        model.load_state_dict({**values.trainable, **values.buffers})
        found = finished(task, totals_of(recorded.batches(), len(data)))
        assert found == evaluate(task, model, data, BATCH)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (lambda losses: losses + losses.max().item(), "get value out of a tracing tensor"),
        (torch.rand_like, "it draws random numbers"),
    ],
    ids=["number-on-host", "random"],
)
def test_an_evaluation_that_cannot_be_recorded_says_why(extra: Callable[[Tensor], Tensor], why: str) -> None:
    """Metrics that read a number on the host, or draw random numbers."""
    task: Any = Images(extra)
    with pytest.raises(NotRecorded, match=why):
        RecordedEvaluation(task, task.model(), task.eval_data(), BATCH)


@pytest.mark.parametrize("extra", [torch.zeros_like, torch.rand_like], ids=["recorded", "not-recorded"])
def test_a_model_elsewhere_is_evaluated_as_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, extra: Callable[[Tensor], Tensor]
) -> None:
    """The CPU stands for another device. All metrics but random ones are the same; the report says how."""
    task: Any = Images(extra)
    here = EvaluatedModel(task, CPU, BATCH, seed=0)
    expected = [here.evaluate(values_of(seed, task)) for seed in range(3)]
    monkeypatch.setattr(evaluation, "CPU", ELSEWHERE)
    there = EvaluatedModel(task, CPU, BATCH, seed=0)
    for seed, one in enumerate(expected):
        found = there.evaluate(values_of(seed, task))
        assert {**found, "extra": one["extra"]} == one
    drawn = extra is torch.rand_like
    assert there.report == (
        "the evaluation is not recorded (it draws random numbers)" if drawn else "the evaluation is a recorded step"
    )
    assert here.report == ""


def test_an_evaluation_is_recorded_on_cuda(gpu: torch.device) -> None:
    """Its metrics are those of the CPU to the rounding of sums; a number that the host reads is a reason not to."""
    for extra, recorded in ((torch.zeros_like, True), (lambda losses: losses * 0 + losses.max().item() * 0, False)):
        task: Any = Images(extra)
        here, there = (EvaluatedModel(task, device, BATCH, seed=0) for device in (CPU, gpu))
        for seed in range(3):
            values = values_of(seed, task)
            assert there.evaluate(values) == pytest.approx(here.evaluate(values), rel=1e-4, abs=1e-6)
        assert there.report.startswith("the evaluation is a recorded" if recorded else "the evaluation is not recorded")
