"""The work of one assignment on the device: load the bundles, train or evaluate, make the update. No network here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from algorithms import tree
from algorithms.base import Algorithm, ClientContext, Exchange, LocalSettings, Memory, Tensors
from algorithms.client import LocalData, Work, answer
from algorithms.gradients import Batches
from algorithms.model_state import trainable_views
from algorithms.parameters import AlgorithmError
from fl_client import answers, model_values
from fl_client.data import LocalTask
from fl_client.device import AS_IT_IS, Compute
from fl_client.errors import WorkFailed
from fl_client.model_values import Bundles, Layouts
from fl_client.next_state import NextState
from fl_client.updates import Update
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tasks.batches import batches, count_steps, seed_everything, whole
from tasks.evaluation import evaluate


class Interrupted(Exception):
    """Raised by an `on_step` to end the training: the result is not wanted any more."""


OnStep = Callable[[int, int], object]
"""Called after each step, or batch of a full gradient, with its number from 1 and how many there are in all; what it
raises ends the training."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What training gave."""

    update: Update
    next_state: NextState | None
    """What to keep of the round, should it count; None where the clients of the method keep nothing of the exchange."""


class Trainer:
    """One task's model, on the data's device, given the coordinator's values for each assignment.

    Its methods run on one thread at a time: they seed torch's default generators, which the process shares.
    """

    def __init__(self, local: LocalTask, model: nn.Module | None = None, compute: Compute = AS_IT_IS) -> None:
        """model: the task's, on the data's device; trainers that take turns may share one. None: made when needed.

        compute: how the model is computed, if it is made here.
        """
        self._local, self._compute = local, compute
        self._model = model
        self.layouts: Layouts | None = None
        """How the bundles of the model lie; None until `prepare` was called."""

    @property
    def examples(self) -> int:
        """Training examples of this device."""
        return len(self._local.train)

    def prepare(self) -> None:
        """Make the model, if that was not done before, so that it is known what its bundles are. Raises WorkFailed."""
        model = self._made()
        with _failures():
            self.layouts = model_values.layouts_of(model)

    def train(
        self, assignment: training_pb2.Assignment, bundles: Bundles, kept: Memory | None, on_step: OnStep
    ) -> Trained:
        """The answer to an assignment: a function of the assignment, the bundles, the state and the local data alone.

        kept: what this client keeps of its last round that counted; None: it starts from the method's initial state.

        Raises:
            WorkFailed: it cannot be done here; says why.
        """
        training = assignment.training
        self.check(assignment.task, assignment.fingerprint)
        algorithm = answers.method_of(training)
        exchange = answers.exchange_of(assignment, algorithm)
        model, x = self._load(bundles)
        answers.check_size(assignment, exchange, bundles[tensor_pb2.RESOURCE_KIND_MODEL].layout)
        context = self._context(assignment, model, _Given(algorithm, model_values.direction(model, bundles), kept))
        settings = LocalSettings(training.learning_rate, training.weight_decay, training.max_gradient_norm)
        work = Work(algorithm, context, settings, assignment.key.exchange, x)
        started = time.monotonic()
        with _failures():
            data, steps = self._data(training, exchange)
            seed_everything(training.seed)
            made = answer(model, data, work, on_step=lambda step: on_step(step + 1, steps))
        seconds = time.monotonic() - started
        answers.check_finite(made)
        update = answers.update_of(assignment, made, len(self._local.train), seconds)
        keeps = algorithm.keeps_client_state and exchange.trains
        return Trained(update, NextState.of(algorithm, context, made) if keeps else None)

    def evaluate(self, assignment: training_pb2.EvaluationAssignment, bundles: Bundles) -> tuple[int, dict[str, float]]:
        """Examples and the mean of each metric over this device's held-out part. Raises WorkFailed as `train` does."""
        self.check(assignment.task, assignment.fingerprint)
        if not len(self._local.held_out):
            raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, "expected held-out examples on this device, it has none")
        model, _ = self._load(bundles)
        with _failures():
            metrics = evaluate(self._local.task, model, self._local.held_out)
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected finite metrics, got {bad[0]} = {metrics[bad[0]]}")
        return len(self._local.held_out), metrics

    def check(self, task: str, fingerprint: training_pb2.TaskFingerprint) -> None:
        """Raises WorkFailed unless task and code are the ones that are here."""
        if task != self._local.name:
            raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"expected task {self._local.name!r}, got {task!r}")
        here = self._local.fingerprint
        if fingerprint != here:
            raise WorkFailed(
                pb.FAILURE_REASON_FINGERPRINT,
                f"task {task}: expected the coordinator's code, version {fingerprint.version!r} {fingerprint.source},"
                f" got version {here.version!r} {here.source} here: install the same version on both sides",
            )

    def _load(self, bundles: Bundles) -> tuple[nn.Module, Tensors]:
        """The model with the values of the bundles, made anew only the first time; and x, in the bundle's memory."""
        model = self._made()
        return model, model_values.load(model, bundles)

    def _made(self) -> nn.Module:
        if self._model is None:
            with _failures():
                self._model = self._compute.prepared(self._local.task.model(), self._local.train.inputs.device)
        return self._model

    def _context(self, assignment: training_pb2.Assignment, model: nn.Module, given: _Given) -> ClientContext:
        """What this client has when the exchange begins, on the model's device."""
        state = given.algorithm.client_init(trainable_views(model))
        if given.kept is not None and given.algorithm.keeps_client_state:
            _check_kept(state, given.kept)
            state = given.kept
        device = self._local.train.inputs.device
        return ClientContext(
            None if given.direction is None else _brought(given.direction, device),
            {symbol: _brought(tensors, device) for symbol, tensors in state.items()},
            self._omega(assignment.training),
        )

    def _omega(self, training: training_pb2.LocalTraining) -> float:
        """omega_i = N n_i / sum n over the population; 1 where the objective is not weighted by examples."""
        if not training.population_examples:
            return 1.0
        return training.population * len(self._local.train) / training.population_examples

    def _data(self, training: training_pb2.LocalTraining, exchange: Exchange) -> tuple[LocalData, int]:
        """The local examples as the work goes through them, and its batches in all: of a full gradient, then steps."""
        examples, size = self._local.train, training.batch_size
        work = {
            "epochs": training.local_epochs if training.WhichOneof("work") == "local_epochs" else None,
            "steps": training.local_steps if training.WhichOneof("work") == "local_steps" else None,
        }
        steps: Batches = batches(examples, size, training.seed, **work)
        total = count_steps(len(examples), size, epochs=1) if exchange.passes else 0
        total += count_steps(len(examples), size, **work) if exchange.trains else 0
        return LocalData(steps, whole(examples, size), self._local.task.loss), total


@dataclass(frozen=True, slots=True)
class _Given:
    algorithm: Algorithm
    direction: Tensors | None
    kept: Memory | None


def _check_kept(initial: Memory, kept: Memory) -> None:
    """Raises WorkFailed unless the state kept is one of this method for this model."""
    try:
        for symbol, tensors in initial.items():
            tree.check_layout(tensors, kept.get(symbol, {}), f"client state {symbol}")
    except ValueError as error:
        raise WorkFailed(pb.FAILURE_REASON_STATE_LOST, str(error)) from None


def _brought(tensors: Tensors, device: torch.device) -> Tensors:
    return tree.map(lambda tensor: tensor.to(device), tensors)


@contextmanager
def _failures() -> Iterator[None]:
    """Whatever the task's code, torch or the device raises, as a failure that the coordinator hears of."""
    try:
        yield
    except (Interrupted, WorkFailed):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise WorkFailed(pb.FAILURE_REASON_RESOURCES, f"out of memory: {error}") from error
    except AlgorithmError as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"algorithm: {error}") from error
    except Exception as error:
        hint = _BATCH_OF_ONE if "more than 1 value per channel" in str(error) else ""
        raise WorkFailed(pb.FAILURE_REASON_TASK_ERROR, f"{type(error).__name__}: {error}{hint}") from error


_BATCH_OF_ONE = (
    ": batch norm needs two examples in every batch, and here one has a single example. Choose a batch_size that leaves"
    " no remainder of one on any device, or GroupNorm in place of BatchNorm"
)
