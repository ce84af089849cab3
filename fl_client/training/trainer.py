"""Training and evaluation for one assignment: load the bundles, compute, and make the update. No network here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import nn

from algorithms import tree
from algorithms.base import Algorithm, ClientContext, Exchange, LocalSettings, Memory, Tensors
from algorithms.client import LocalData, Work, answer
from algorithms.gradients import Batches
from algorithms.model_state import trainable_views
from algorithms.parameters import AlgorithmError
from algorithms.precision import widened
from fl_client.connection.bundles import Layouts
from fl_client.errors import WorkFailed
from fl_client.settings.device import DEFAULT_COMPUTE, Compute
from fl_client.storage.client_state_store import NextState
from fl_client.storage.pending_updates import Update
from fl_client.training import model_values, payloads
from fl_client.training.data import LocalTask
from fl_client.training.local_model import LocalModel
from fl_client.training.model_values import Bundles
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tasks.batches import batches, count_steps, ordered_batches, seed_everything
from tasks.data.forms import forward_of
from tasks.evaluation import evaluate

log = structlog.get_logger()


class Interrupted(Exception):
    """Raised by an `on_step` to end the training: its result is not needed."""


AnyAssignment = training_pb2.Assignment | training_pb2.EvaluationAssignment
"""What both have: the bundles to load."""

OnStep = Callable[[int, int], object]
"""Called after each step, or batch of a full gradient, with its number from 1 and the total.

An exception that it raises ends the training.
"""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """An update, and the client state to keep if it counts."""

    update: Update
    next_state: NextState | None
    """None where the method has no client state in this exchange."""


class Trainer:
    """The model of one task, on the data's device, which gets the coordinator's values for each assignment.

    One thread at a time: the methods seed torch's default generators, which the process shares.
    """

    def __init__(
        self, local: LocalTask, model: nn.Module | LocalModel | None = None, compute: Compute = DEFAULT_COMPUTE
    ) -> None:
        """model: the task's, on the data's device. Trainers that take turns may share one. None: made when needed.

        compute: precision and memory format of a model that is made here.
        """
        self._local = local
        if model is None:
            model = LocalModel(local.task.model, lambda module: compute.prepared(module, local.device))
        self._model = model if isinstance(model, LocalModel) else LocalModel.of(model)
        self.layouts: Layouts | None = None
        """Layouts of the model's bundles. None before `prepare`."""

    @property
    def examples(self) -> int:
        """Number of training examples of this device."""
        return len(self._local.train)

    @property
    def own_batches(self) -> int:
        """Batches of an epoch that the task makes itself; 0 if the run's batch size applies."""
        return self._local.train.own_batches

    @property
    def held_out(self) -> int:
        """Number of held-out examples of this device."""
        return len(self._local.held_out)

    def prepare(self) -> None:
        """Make the model, if there is none, and set `layouts`. Raises WorkFailed."""
        model = self._get_model()
        with _task_failures():
            self.layouts = model_values.layouts_of(model)

    def own_frozen(self) -> tensor_pb2.Resource | None:
        """The frozen parameters that the task gives its model, for the registration; None if there are none.

        Makes the model. One that cannot be made is logged here, and reported with the first assignment.
        """
        try:
            with _task_failures():
                return self._model.frozen
        except WorkFailed as error:
            log.warning("model_not_made", task=self._local.name, reason=str(error))
            return None

    def train(
        self, assignment: training_pb2.Assignment, bundles: Bundles, client_state: Memory | None, on_step: OnStep
    ) -> TrainingResult:
        """Train for an assignment. The result depends on assignment, bundles, client state and local data alone.

        client_state: after this client's last round that counted. None: the method's initial state.

        Raises:
            WorkFailed: the training is not possible here; the message names the reason.
        """
        training = assignment.training
        self.check_task(assignment.task, assignment.fingerprint)
        algorithm = self.method_of(training)
        exchange = payloads.exchange_of(assignment, algorithm)
        model, x = self._load(assignment, bundles)
        payloads.check_size(assignment, exchange, bundles[tensor_pb2.RESOURCE_KIND_MODEL].layout)
        context = self._context(
            model_values.direction(model, bundles),
            _state_of(algorithm, model, client_state),
            self._omega(algorithm, training),
        )
        settings = LocalSettings(training.learning_rate, training.weight_decay, training.max_gradient_norm)
        work = Work(algorithm, context, settings, assignment.key.exchange, x)
        started = time.monotonic()
        with _task_failures():
            data, steps = self._data(training, exchange)
            seed_everything(training.seed)
            computed = answer(model, data, work, on_step=lambda step: on_step(step + 1, steps))
        seconds = time.monotonic() - started
        payloads.check_finite(computed)
        update = payloads.pack_update(assignment, computed, len(self._local.train), seconds)
        keeps_state = algorithm.keeps_client_state and exchange.trains
        return TrainingResult(update, NextState.of(algorithm, context, computed) if keeps_state else None)

    def evaluate(self, assignment: training_pb2.EvaluationAssignment, bundles: Bundles) -> tuple[int, dict[str, float]]:
        """The number of held-out examples, and the mean of each metric over them. Raises WorkFailed as `train` does."""
        self.check_task(assignment.task, assignment.fingerprint)
        if not len(self._local.held_out):
            raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, "expected held-out examples on this device, got none")
        model, _ = self._load(assignment, bundles)
        with _task_failures():
            metrics = evaluate(self._local.task, model, self._local.held_out)
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected finite metrics, got {bad[0]} = {metrics[bad[0]]}")
        return len(self._local.held_out), metrics

    def method_of(self, training: training_pb2.LocalTraining) -> Algorithm:
        """The method that an assignment names. Raises WorkFailed if this device does not have the same."""
        return payloads.method_of(training, self._local.methods)

    def check_task(self, task: str, fingerprint: training_pb2.TaskFingerprint) -> None:
        """Raises WorkFailed unless this device has the task with the same fingerprint."""
        if task != self._local.name:
            raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"expected task {self._local.name!r}, got {task!r}")
        here = self._local.fingerprint
        if fingerprint != here:
            raise WorkFailed(
                pb.FAILURE_REASON_FINGERPRINT,
                f"task {task}: expected the coordinator's code, version {fingerprint.version!r} {fingerprint.source},"
                f" got version {here.version!r} {here.source} here: install the same version on both sides",
            )

    def _load(self, assignment: AnyAssignment, bundles: Bundles) -> tuple[nn.Module, Tensors]:
        """The model with the values of the bundles, and x in the bundle's memory."""
        if assignment.HasField("local_frozen"):
            with _task_failures():
                model = self._model.with_own_frozen(assignment.local_frozen)
            return model, model_values.load(model, bundles, keep_frozen=True)
        model = self._get_model()
        if tensor_pb2.RESOURCE_KIND_FROZEN in bundles:
            self._model.replaced()
        return model, model_values.load(model, bundles)

    def _get_model(self) -> nn.Module:
        with _task_failures():
            return self._model.module()

    def _context(self, direction: Tensors | None, state: Memory, omega: float) -> ClientContext:
        """Direction, client state and weight at the beginning of the exchange, on the model's device."""
        device = self._local.device
        return ClientContext(
            None if direction is None else _moved(direction, device),
            {symbol: _moved(tensors, device) for symbol, tensors in state.items()},
            omega,
        )

    def _omega(self, algorithm: Algorithm, training: training_pb2.LocalTraining) -> float:
        """omega_i = N n_i / sum n over the population; 1 if the objective is not weighted by examples.

        Only the method's objective decides. Older coordinators send population_examples for both objectives.
        """
        if algorithm.objective == "uniform":
            return 1.0
        if not training.population or not training.population_examples:
            raise WorkFailed(
                pb.FAILURE_REASON_UNSUPPORTED,
                f"training: expected population and population_examples over 0 for {algorithm.name} with objective ="
                f" 'examples', got {training.population} and {training.population_examples}",
            )
        return training.population * len(self._local.train) / training.population_examples

    def _data(self, training: training_pb2.LocalTraining, exchange: Exchange) -> tuple[LocalData, int]:
        """The local examples in batches, and the number of batches: of a full gradient, then of steps."""
        local, size = self._local.train, training.batch_size
        work: dict[str, Any] = {
            "epochs": training.local_epochs if training.WhichOneof("work") == "local_epochs" else None,
            "steps": training.local_steps if training.WhichOneof("work") == "local_steps" else None,
        }
        steps: Batches = batches(local, size, training.seed, **work)
        own = local.own_batches
        total = count_steps(len(local), size, epochs=1, own_batches=own) if exchange.passes else 0
        total += count_steps(len(local), size, own_batches=own, **work) if exchange.trains else 0
        task = self._local.task
        return LocalData(steps, ordered_batches(local, size), task.loss, forward_of(task)), total


def _state_of(algorithm: Algorithm, model: nn.Module, client_state: Memory | None) -> Memory:
    """The client state, or the method's initial one. Raises WorkFailed for a state that does not fit the model."""
    initial = algorithm.client_init(trainable_views(model))
    if client_state is None or not algorithm.keeps_client_state:
        return initial
    try:
        # Older daemons kept the state of a model of low precision in the model's dtype.
        kept = {symbol: widened(client_state.get(symbol, {})) for symbol in initial}
        for symbol, tensors in initial.items():
            tree.check_layout(tensors, kept[symbol], f"client state {symbol}")
    except ValueError as error:
        raise WorkFailed(pb.FAILURE_REASON_STATE_LOST, str(error)) from None
    return {**client_state, **kept}


def _moved(tensors: Tensors, device: torch.device) -> Tensors:
    return tree.map(lambda tensor: tensor.to(device), tensors)


@contextmanager
def _task_failures() -> Iterator[None]:
    """Turn any error of the task's code, torch or the device into a failure that is reported to the coordinator."""
    try:
        yield
    except (Interrupted, WorkFailed):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise WorkFailed(pb.FAILURE_REASON_RESOURCES, f"out of memory: {error}") from error
    except AlgorithmError as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"algorithm: {error}") from error
    except Exception as error:  # a fault in the task's own code, of any type
        # torch has no type for this error. The text selects a hint and decides nothing.
        hint = _BATCH_OF_ONE if "more than 1 value per channel" in str(error) else ""
        raise WorkFailed(pb.FAILURE_REASON_TASK_ERROR, f"{type(error).__name__}: {error}{hint}") from error


_BATCH_OF_ONE = (
    ": batch norm needs two examples in every batch, and here one has a single example. Choose a batch_size that leaves"
    " no remainder of one on any device, or GroupNorm in place of BatchNorm"
)
