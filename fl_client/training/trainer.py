"""Training and evaluation for one assignment: load the bundles, compute, and make the update. No network here."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import nn

from algorithms import tree
from algorithms.base import Algorithm, ClientContext, ClientUpdate, Exchange, Memory, Tensors
from algorithms.client import Work, answer
from algorithms.gradients import Processes
from algorithms.optimizers.classes import NO_CLASSES, Known
from fl_client.connection.bundles.expected import Layouts
from fl_client.errors import WorkFailed, not_finite, unsupported
from fl_client.settings.device import DEFAULT_COMPUTE, Compute
from fl_client.training import client_states, local_model, payloads
from fl_client.training.data import LocalTask
from fl_client.training.local_model import Bundles, LocalModel
from fl_client.training.methods import omega_of, ordered_data, settings_of
from fl_client.training.own_loop import OnStep, OwnTraining, Round
from fl_client.training.private import PrivateWork, check_private
from fl_client.training.results import Evaluation, PreparedWork, TrainingResult, result_of, task_failures
from fl_client.training.rounded import wanted_metrics
from fl_common.secure_aggregation.scalars import Measured
from fl_tasks.batches import seed_everything
from fl_tasks.evaluation import totals
from fl_tasks.new_model import new_model
from fl_tasks.own_loop import own_loop
from fl_tasks.summed_metrics import PlainSum, finite_values_of, plain
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2

log = structlog.get_logger()


class Together(Processes, Protocol):
    """The processes of a daemon that train together."""

    def working(
        self, assignment: training_pb2.Assignment, bundles: Bundles, state: Memory | None
    ) -> AbstractContextManager[None]:
        """The context in which all of them train for an assignment."""
        ...


AnyAssignment = training_pb2.Assignment | training_pb2.EvaluationAssignment
"""What both have: the values to load."""


class Trainer:
    """The model of one task, on the data's device, which gets the coordinator's values for each assignment.

    One thread at a time: the methods seed torch's default generators, which the process shares.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what the training depends on
        self,
        local: LocalTask,
        model: nn.Module | LocalModel | None = None,
        compute: Compute = DEFAULT_COMPUTE,
        optimizers: Known = NO_CLASSES,
        together: Together | None = None,
    ) -> None:
        """model: the task's, on the data's device. Trainers that take turns may share one. None: made when needed.

        compute: precision and memory format of a model that is made here.
        optimizers: classes of other packages for local steps.
        together: the processes that compute each batch together. None: this one alone.
        """
        self.local, self._compute, self._optimizers = local, compute, optimizers
        self._together = together
        if model is None:
            model = LocalModel(lambda: new_model(local.task), lambda module: compute.prepared(module, local.device))
        self._model = model if isinstance(model, LocalModel) else LocalModel.of(model)
        self._layouts: dict[tuple[tuple[str, ...], bool], Layouts] = {}
        """Layouts of the model's bundles, by the patterns of personal parameters and whether frozen ones are here."""
        self._method: tuple[tuple[bytes, ...], Algorithm] | None = None
        """The latest method, with the bytes that named it and its optimizer: one assignment asks several times."""

    def leave(self) -> None:
        """Nobody waits for the work under way any more. The caller's thread ends it at the next step."""

    def serves(self, assignment: AnyAssignment) -> bool:
        """Whether this is the trainer of an assignment's task, and of its data if it names some."""
        local = self.local
        return assignment.task == local.name and assignment.data in ("", local.data)

    def layouts(self, assignment: AnyAssignment) -> Layouts:
        """The layouts of an assignment's bundles. The first call makes the model. Raises WorkFailed."""
        if (known := self.known_layouts(assignment)) is not None:
            return known
        model, (personal, own_frozen) = self._get_model(), _layouts_key(assignment)
        with task_failures():
            layouts = local_model.layouts_of(model, client_states.personal_in(model, personal), own_frozen=own_frozen)
        self._layouts = {(personal, own_frozen): layouts}  # a coordinator may have many runs: the latest is kept
        return layouts

    def known_layouts(self, assignment: AnyAssignment) -> Layouts | None:
        """What `layouts` returns at once; None if it has to make the model, or to look at it."""
        return self._layouts.get(_layouts_key(assignment))

    def own_frozen(self) -> tensor_pb2.Resource | None:
        """The frozen parameters that the task gives its model, for the registration; None if there are none.

        Makes the model. One that cannot be made is logged here, and reported with the first assignment.
        """
        try:
            with task_failures():
                frozen = self._model.frozen
        except WorkFailed as error:
            log.warning("model_not_made", task=self.local.name, reason=str(error))
            return None
        if frozen is None:
            self._model.release()  # it is made again for the first work; an idle daemon needs no memory for it
        return frozen

    def train(  # noqa: PLR0913, PLR0917 - what the result depends on
        self,
        assignment: training_pb2.Assignment,
        bundles: Bundles,
        client_state: Memory | None,
        on_step: OnStep,
        private: PrivateWork | None = None,
    ) -> TrainingResult:
        """Train for an assignment. The result depends on assignment, bundles, client state and local data alone.

        client_state: after this client's last round that counted. None: the method's initial state.
        private: the private steps of an assignment with privacy, which are charged already.

        Raises:
            WorkFailed: the training is not possible here; the message names the reason.
        """
        ready = self.prepare(assignment, bundles, client_state, on_step, private)
        together = self._together if private is None else None
        working = nullcontext() if together is None else together.working(assignment, bundles, client_state)
        with working, task_failures():
            started = time.monotonic()  # without the wait for the others
            computed = self._computed(assignment, ready, on_step)
            seconds = time.monotonic() - started
        if private is None:
            return self.finish(assignment, ready, computed, seconds)
        # The time depends on the sizes of the batches, which are drawn in secret.
        result = self.finish(assignment, ready, computed, 0.0)
        result.update.header.privacy.CopyFrom(private.header())
        return result

    def train_along(self, assignment: training_pb2.Assignment, bundles: Bundles, client_state: Memory | None) -> None:
        """Train as one of the other processes of a daemon, whose own result counts. Raises WorkFailed."""
        ready = self.prepare(assignment, bundles, client_state, lambda step, steps: None)
        with task_failures():
            self._computed(assignment, ready, lambda step, steps: None)

    def _computed(self, assignment: training_pb2.Assignment, ready: PreparedWork, on_step: OnStep) -> ClientUpdate:
        rank = 0 if self._together is None else self._together.rank  # each has its own dropout
        seed_everything((assignment.training.seed + rank) % 2**64)
        return answer(ready.model, ready.data, ready.work, on_step=lambda step: on_step(step + 1, ready.steps))

    def prepare(  # noqa: PLR0913, PLR0917 - as train
        self,
        assignment: training_pb2.Assignment,
        bundles: Bundles,
        client_state: Memory | None,
        on_step: OnStep,
        private: PrivateWork | None = None,
    ) -> PreparedWork:
        """Load the values of an assignment into the model. The training itself is the caller's. Raises WorkFailed."""
        training = assignment.training
        self.check_task(assignment)
        if training.HasField("privacy") != (private is not None):
            raise unsupported("privacy: expected private steps where they are asked")
        if private is not None:
            self.check_private(assignment)
        algorithm = self.method_of(training)
        exchange = payloads.exchange_of(assignment, algorithm)
        personal = client_states.personal_in(self._get_model(), assignment.personal)
        model, x, buffers = self._load(assignment, bundles, personal)
        client_states.load_personal(model, personal, client_state)
        payloads.check_size(assignment, exchange, bundles[tensor_pb2.RESOURCE_KIND_MODEL].layout)
        context = self._context(
            local_model.direction(model, bundles, personal),
            client_states.state_of(algorithm, model, client_states.of_method(client_state), personal),
            omega_of(algorithm, training, len(self.local.train)),
            local_model.optimizer_state(model, bundles, personal),
        )
        settings = settings_of(training, scaled_loss=self._compute.precision == "float16")
        work = Work(algorithm, context, settings, assignment.key.exchange, x, personal)
        with task_failures():
            position = client_states.ReadPosition.of(client_state, training.seed) if training.continue_data else None
            start = (training.seed, 0) if position is None else (position.seed, position.batches)
            own = self.local.task, self.local.train
            ordered = partial(ordered_data, *own, training, exchange, start, self._together)
            data, steps = ordered() if private is None else private.data_of(*own, training.seed)
            if exchange.trains and (loop := own_loop(self.local.task)) is not None:
                payloads.check_loop(algorithm)
                of_round = Round(assignment.key.round, context.direction, on_step, self._together)
                data = replace(data, loop=OwnTraining(loop, model, self.local.train, training, of_round).run)
        unsent = client_states.unsent_in(client_state, payloads.encoding_of(assignment))
        return PreparedWork(model, data, work, steps, buffers, unsent, position)

    def check_private(self, assignment: training_pb2.Assignment) -> None:
        """Raises WorkFailed for an assignment with privacy that this device cannot train without revealing more."""
        if own_loop(self.local.task) is not None:
            raise unsupported(
                "privacy: expected a task without a training loop of its own, whose steps cannot be made private"
            )
        check_private(assignment, self.method_of(assignment.training), self.local.train, self._get_model())

    def finish(
        self, assignment: training_pb2.Assignment, ready: PreparedWork, computed: ClientUpdate, seconds: float
    ) -> TrainingResult:
        """The update of computed payloads. seconds: of training. Raises WorkFailed for a value that is not finite."""
        return result_of(assignment, ready, computed, self.examples_of(computed), seconds)

    def examples_of(self, computed: ClientUpdate) -> int:
        """n_i of computed payloads."""
        return computed.examples or len(self.local.train)

    def own_evaluation(self) -> training_pb2.EvaluationAssignment:
        """An evaluation of this device's task by its own code, without a model yet."""
        local = self.local
        return training_pb2.EvaluationAssignment(task=local.name, fingerprint=local.fingerprint, data=local.data)

    def evaluate(
        self, assignment: training_pb2.EvaluationAssignment, bundles: Bundles, client_state: Memory | None = None
    ) -> Evaluation:
        """The mean of each metric over the held-out examples, of the averaged model too if it is among the bundles.

        client_state: the run's, whose personal values are used. None: their initial values.
        Raises WorkFailed as `train` does.
        """
        self.check_task(assignment)
        if not len(self.local.held_out):
            raise unsupported("expected held-out examples on this device, got none")
        evaluation = self._evaluated(assignment, bundles, client_state)
        averaged = bundles.get(tensor_pb2.RESOURCE_KIND_AVERAGED)
        if averaged is None:
            return evaluation
        of_averaged = {**bundles, tensor_pb2.RESOURCE_KIND_MODEL: averaged}
        return evaluation.with_averaged(self._evaluated(assignment, of_averaged, client_state))

    def evaluate_file(
        self, assignment: training_pb2.EvaluationAssignment, weights: Path, client_state: Memory | None = None
    ) -> Evaluation:
        """The metrics of the model in a safetensors file. Frozen parameters that it lacks are this device's own."""
        tensors, layouts = local_model.read_tensors(weights), self.layouts(assignment)
        frozen = layouts.get(tensor_pb2.RESOURCE_KIND_FROZEN)
        lacks = frozen is not None and not local_model.names_of(frozen) <= tensors.keys()
        if lacks and (own := self.own_frozen()) is not None:
            assignment.local_frozen.CopyFrom(own)
            layouts = self.layouts(assignment)
        return self.evaluate(assignment, local_model.bundles_of(tensors, layouts), client_state)

    def measure_received(
        self, assignment: training_pb2.Assignment, bundles: Bundles, client_state: Memory | None
    ) -> Measured:
        """The metrics of the model that came for training, for sums under masks; before `train`, which loads it again.

        A device without held-out examples, or that cannot measure, contributes nothing, and trains all the same.
        """
        wanted = wanted_metrics(assignment)
        if not wanted or not len(self.local.held_out):
            return Measured()
        evaluation = training_pb2.EvaluationAssignment(
            task=assignment.task, fingerprint=assignment.fingerprint, personal=assignment.personal, data=assignment.data
        )
        if assignment.HasField("local_frozen"):
            evaluation.local_frozen.CopyFrom(assignment.local_frozen)
        try:
            measured = self.evaluate(evaluation, bundles, client_state)
        except WorkFailed as error:
            log.warning("received_model_not_measured", task=self.local.name, reason=str(error))
            return Measured()
        return Measured(None, measured.examples, measured.metrics)

    def _evaluated(
        self, assignment: training_pb2.EvaluationAssignment, bundles: Bundles, client_state: Memory | None
    ) -> Evaluation:
        personal = client_states.personal_in(self._get_model(), assignment.personal)
        model, _, _ = self._load(assignment, bundles, personal)
        metrics, sums = self._measured(model)
        if not personal:
            return Evaluation(len(self.local.held_out), metrics, {}, sums)
        without = metrics, sums
        client_states.load_personal(model, personal, client_state, pb.FAILURE_REASON_LAYOUT)
        metrics, sums = self._measured(model) if client_state is not None else without
        return Evaluation(len(self.local.held_out), metrics, without[0], sums, without[1])

    def _measured(self, model: nn.Module) -> tuple[dict[str, float], list[PlainSum]]:
        """The metrics, and the sums of those that are no means, whose values for this device may be unknown."""
        with task_failures():
            measured = totals(self.local.task, model, self.local.held_out)
            values = finite_values_of(self.local.task, measured.sums)
        bad = [f"{name} = {value}" for name, value in measured.means.items() if not math.isfinite(value)]
        bad += [f"the sums of {metric}" for (metric, _), sums in measured.sums.items() if not np.isfinite(sums).all()]
        if bad:
            raise not_finite(f"expected finite metrics, got {bad[0]}")
        return {**measured.means, **values}, plain(measured.sums)

    def method_of(self, training: training_pb2.LocalTraining) -> Algorithm:
        """The method that an assignment names. Raises WorkFailed if this device does not have the same."""
        named = tuple(part.SerializeToString(deterministic=True) for part in (training.algorithm, training.optimizer))
        if self._method is None or self._method[0] != named:
            self._method = named, payloads.method_of(training, self.local.methods, self._optimizers)
        return self._method[1]

    def exchange_of(self, assignment: training_pb2.Assignment) -> Exchange:
        """The exchange that an assignment asks for. Raises WorkFailed as `method_of`, and for an unknown exchange."""
        return payloads.exchange_of(assignment, self.method_of(assignment.training))

    def keeps_state(self, assignment: training_pb2.Assignment) -> bool:
        """Whether this device keeps a state for the assignment's run. Raises WorkFailed as `method_of`."""
        kept = payloads.encoding_of(assignment).sparse or assignment.training.continue_data
        return bool(assignment.personal) or kept or self.method_of(assignment.training).keeps_client_state

    def check_task(self, assignment: AnyAssignment) -> None:
        """Raises WorkFailed unless this device has the task with the same fingerprint, and the data."""
        task, fingerprint = assignment.task, assignment.fingerprint
        if not self.serves(assignment):
            came = f"{task}@{assignment.data}" if assignment.data else task
            raise unsupported(f"expected task {self.local.title!r}, got {came!r}")
        here = self.local.fingerprint
        if fingerprint != here:
            raise WorkFailed(
                pb.FAILURE_REASON_FINGERPRINT,
                f"task {task}: expected the coordinator's code, version {fingerprint.version!r} {fingerprint.source},"
                f" got version {here.version!r} {here.source} here: install the same version on both sides",
            )

    def _load(
        self, assignment: AnyAssignment, bundles: Bundles, personal: frozenset[str]
    ) -> tuple[nn.Module, Tensors, Tensors]:
        """The model with the values of the bundles, and x and the buffers in the bundle's memory."""
        if assignment.HasField("local_frozen"):
            with task_failures():
                model = self._model.with_own_frozen(assignment.local_frozen)
            return model, *local_model.load(model, bundles, personal, own_frozen=True)
        model = self._get_model()
        if tensor_pb2.RESOURCE_KIND_FROZEN in bundles:
            self._model.replaced()
        return model, *local_model.load(model, bundles, personal)

    def _get_model(self) -> nn.Module:
        with task_failures():
            return self._model.module()

    def _context(self, direction: Tensors | None, state: Memory, omega: float, optimizer: Memory) -> ClientContext:
        """Direction, client state and weight at the beginning of the exchange, on the model's device."""
        device = self.local.device
        return ClientContext(
            None if direction is None else _moved(direction, device),
            {symbol: _moved(tensors, device) for symbol, tensors in state.items()},
            omega,
            {symbol: _moved(tensors, device) for symbol, tensors in optimizer.items()},
        )


def _layouts_key(assignment: AnyAssignment) -> tuple[tuple[str, ...], bool]:
    return tuple(assignment.personal), assignment.HasField("local_frozen")


def _moved(tensors: Tensors, device: torch.device) -> Tensors:
    return tree.map(lambda tensor: tensor.to(device), tensors)
