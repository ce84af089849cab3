"""Runs the training loop of a task's own, in place of the local steps of the method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from algorithms.base import Tensors
from algorithms.batches import to_device
from algorithms.client import LoopReport
from algorithms.gradients import Processes
from fl_client.training.methods import shared, work_of
from fl_tasks.batches import batches, count_steps
from fl_tasks.data.forms import Data
from fl_tasks.own_loop import Batch, OwnLoop, TrainContext, TrainReport, checked_report, most_steps
from protos.fl.v1 import training_pb2

OnStep = Callable[[int, int], object]
"""Called after each step, or batch of a full gradient, with its number from 1 and the total.

An exception that it raises ends the training.
"""


@dataclass(frozen=True, slots=True)
class Round:
    """The round that a loop trains for."""

    number: int
    direction: Tensors | None
    on_step: OnStep
    processes: Processes | None = None
    """Those that run the loop together. None: this one alone."""


class OwnTraining:
    """One call of a task's training loop."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a loop needs
        self, task: OwnLoop, model: nn.Module, data: Data, training: training_pb2.LocalTraining, round_: Round
    ) -> None:
        self._task, self._model, self._data = task, model, data
        self._training, self._round = training, round_
        self._steps = count_steps(len(data), training.batch_size, own_batches=data.own_batches, **work_of(training))
        self._device = next(model.parameters()).device
        self._done = 0

    def run(self) -> LoopReport:
        """Train the model in place. Raises TaskError for a report that is not valid."""
        training, examples = self._training, len(self._data)
        report = self._task.train(self._model, self._data, self._context())
        checked = checked_report(report, examples, most_steps(examples, training.batch_size, **work_of(training)))
        return LoopReport(checked.steps, checked.examples, _loss(checked), tuple(checked.metrics))

    def _context(self) -> TrainContext:
        training = self._training
        return TrainContext(
            device=self._device,
            **shared(training, TrainContext),
            epochs=work_of(training)["epochs"],
            steps=self._steps,
            round=self._round.number,
            direction=self._round.direction,
            batches=self._batches,
            on_step=self._step,
            rank=0 if self._round.processes is None else self._round.processes.rank,
            processes=1 if self._round.processes is None else self._round.processes.size,
        )

    def _batches(self) -> Iterator[Batch]:
        training, device = self._training, self._device
        for batch in batches(self._data, training.batch_size, training.seed, **work_of(training)):
            yield to_device(batch, device)
            self._step()

    def _step(self) -> None:
        self._done += 1
        self._round.on_step(self._done, max(self._done, self._steps))


def _loss(report: TrainReport) -> float | None:
    """The mean of the epochs' losses; None if an epoch has none."""
    losses = [epoch["loss"] for epoch in report.metrics if "loss" in epoch]
    return sum(losses) / len(losses) if losses and len(losses) == len(report.metrics) else None
