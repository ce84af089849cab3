"""A task with a training loop of its own: Adam, with its own loss and accuracy of each epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from fl_tasks import Examples, TrainContext, TrainReport
from tests.processes.tiny_task import Tiny


class Adam:
    """As torch.optim has it, whose first use imports torch's compiler: two seconds in each process."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self._rate, self._steps = learning_rate, 0
        self._moments = {each: (torch.zeros_like(each), torch.zeros_like(each)) for each in model.parameters()}

    @torch.no_grad()
    def step(self) -> None:
        """Change the parameters by their gradients, and forget these."""
        self._steps += 1
        for parameter, (first, second) in self._moments.items():
            gradient = parameter.grad
            assert gradient is not None
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient * gradient, 0.001)
            scale = (second / (1 - 0.999**self._steps)).sqrt() + 1e-8
            parameter.sub_(self._rate * first / (1 - 0.9**self._steps) / scale)
            parameter.grad = None


class Looped(Tiny):
    """Tiny, trained with Adam. returns: a wrong report to return, by name."""

    def __init__(self, returns: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._returns = returns

    def train(self, model: nn.Module, data: Examples, context: TrainContext) -> TrainReport:
        optimizer = Adam(model, context.learning_rate)
        metrics = [self._epoch(model, optimizer, batches) for batches in context.each_epoch()]
        return cast(TrainReport, self._report(TrainReport(context.steps, len(data), metrics)))

    def _epoch(self, model: nn.Module, optimizer: Adam, batches: Iterable[Any]) -> dict[str, float]:
        losses, correct, examples = 0.0, 0.0, 0
        for inputs, targets in batches:
            output = model(inputs)
            loss = self.loss(output, targets)
            loss.backward()
            optimizer.step()
            losses += loss.item() * len(inputs)
            correct += float((output.argmax(dim=1) == targets).sum())
            examples += len(inputs)
        return {"loss": losses / examples, "accuracy": correct / examples}

    def _report(self, report: TrainReport) -> Any:
        wrong: dict[str, Any] = {
            "nothing": None,
            "nan": TrainReport(report.steps, report.examples, [{"accuracy": float("nan")}]),
        }
        return wrong.get(self._returns, report)
