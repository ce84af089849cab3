"""The work of one assignment on the device: load the bundles, train or evaluate, make the update. No network here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from google.protobuf.json_format import MessageToDict
from torch import Tensor, nn

import algorithms
from algorithms.base import LocalRule, LocalSettings
from algorithms.local import LocalResult, train_locally
from algorithms.model_state import ModelState, load_state, read_state
from fl_client.bundles import Bundle
from fl_client.data import LocalTask
from fl_client.errors import WorkFailed
from fl_client.updates import Update, name_of, work_of
from protos.codec import Layout, LayoutError, digest_message, digest_of, pack, unpack
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tasks.batches import batches, count_steps, seed_everything
from tasks.evaluation import evaluate

Bundles = Mapping[tensor_pb2.ResourceKind, Bundle]


class Interrupted(Exception):
    """Raised by an `on_step` to end the training: the result is not wanted any more."""


OnStep = Callable[[int, int], object]
"""Called after each step with its number from 1 and the steps in all; what it raises ends the training."""


class Trainer:
    """One task's model, made once, on the data's device, and given the coordinator's values for each assignment.

    Its methods run on one thread at a time: they seed torch's default generators, which the process shares.
    """

    def __init__(self, local: LocalTask) -> None:
        self._local = local
        self._model: nn.Module | None = None

    def train(self, assignment: training_pb2.Assignment, bundles: Bundles, on_step: OnStep) -> Update:
        """The update for an assignment: a function of the assignment, the bundles and the local data alone.

        Raises:
            WorkFailed: it cannot be done here; says why.
        """
        training = assignment.training
        self.check(assignment.task, assignment.fingerprint)
        _check_wanted(assignment, bundles)
        model = self._load(bundles)
        rule = _rule(training, bundles)
        started = time.monotonic()
        with _failures():
            result = self._steps(model, training, rule, on_step)
        seconds = time.monotonic() - started
        _check_finite(result)
        return self._update(assignment, result, seconds)

    def evaluate(self, assignment: training_pb2.EvaluationAssignment, bundles: Bundles) -> tuple[int, dict[str, float]]:
        """Examples and the mean of each metric over this device's held-out part. Raises WorkFailed as `train` does."""
        self.check(assignment.task, assignment.fingerprint)
        if not len(self._local.held_out):
            raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, "expected held-out examples on this device, it has none")
        model = self._load(bundles)
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

    def _load(self, bundles: Bundles) -> nn.Module:
        """The model with the values of the bundles; made anew only the first time."""
        with _failures():
            if self._model is None:
                self._model = self._local.task.model().to(self._local.train.inputs.device)
            here = read_state(self._model)
        state = ModelState({}, {}, {})
        expected = {**here.trainable, **here.buffers}
        values = _tensors(bundles, tensor_pb2.RESOURCE_KIND_MODEL, Layout.of(expected, here.trainable.keys()))
        state.trainable.update({name: values[name] for name in here.trainable})
        state.buffers.update({name: values[name] for name in here.buffers})
        if here.frozen:
            state.frozen.update(_tensors(bundles, tensor_pb2.RESOURCE_KIND_FROZEN, Layout.of(here.frozen)))
        load_state(self._model, state)
        return self._model

    def _steps(
        self, model: nn.Module, training: training_pb2.LocalTraining, rule: LocalRule, on_step: OnStep
    ) -> LocalResult:
        work = {
            "epochs": training.local_epochs if training.WhichOneof("work") == "local_epochs" else None,
            "steps": training.local_steps if training.WhichOneof("work") == "local_steps" else None,
        }
        total = count_steps(len(self._local.train), training.batch_size, **work)
        seed_everything(training.seed)
        data = batches(self._local.train, training.batch_size, training.seed, **work)
        settings = LocalSettings(training.learning_rate, training.weight_decay, training.max_gradient_norm)
        return train_locally(
            model, data, self._local.task.loss, rule, settings, on_step=lambda step: on_step(step + 1, total)
        )

    def _update(self, assignment: training_pb2.Assignment, result: LocalResult, seconds: float) -> Update:
        """Deltas of the trainable tensors, then final values of the buffers, as one payload."""
        tensors = {**result.delta, **result.buffers}
        layout = Layout.of(tensors, result.delta.keys())
        data = pack(tensors, layout)
        header = training_pb2.UpdateHeader(
            key=assignment.key,
            attempt=assignment.attempt,
            payloads=[training_pb2.Payload(kind=training_pb2.PAYLOAD_KIND_DELTA, manifest=layout.to_manifest())],
            size_bytes=len(data),
            digest=digest_message(digest_of(data)),
            num_examples=len(self._local.train),
            num_steps=result.steps,
            training_loss=result.loss,
            training_seconds=seconds,
            state_epoch=assignment.state_epoch,
        )
        return Update(work_of(assignment), header, data)


def _check_wanted(assignment: training_pb2.Assignment, bundles: Bundles) -> None:
    """Refuse, before any work, what this daemon could not answer."""
    if list(assignment.payloads) != [training_pb2.PAYLOAD_KIND_DELTA]:
        names = ", ".join(name_of(training_pb2.PayloadKind, kind) for kind in assignment.payloads) or "none"
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"payloads: expected DELTA alone, got {names}")
    if assignment.upload_encodings and tensor_pb2.ENCODING_PLAIN not in assignment.upload_encodings:
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"upload_encodings: expected PLAIN among them, got {list(assignment.upload_encodings)}",
        )
    if assignment.training.WhichOneof("work") is None:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, "training: expected local_epochs or local_steps, got neither")
    model = bundles.get(tensor_pb2.RESOURCE_KIND_MODEL)
    if model is not None and 0 < assignment.max_update_bytes < model.layout.size_bytes:
        raise WorkFailed(
            pb.FAILURE_REASON_RESOURCES,
            f"expected an update of at most {assignment.max_update_bytes} bytes, this model's has"
            f" {model.layout.size_bytes}: raise the coordinator's limit",
        )


def _rule(training: training_pb2.LocalTraining, bundles: Bundles) -> LocalRule:
    """The method's local rule for this round."""
    direction = bundles.get(tensor_pb2.RESOURCE_KIND_DIRECTION)
    given = None if direction is None else unpack(direction.data, direction.layout)
    spec = training.algorithm
    try:
        return algorithms.build(spec.name, **MessageToDict(spec.parameters)).local_rule(given)
    except (ValueError, TypeError, LookupError) as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"algorithm {spec.name!r}: {error}") from error


def _tensors(bundles: Bundles, kind: tensor_pb2.ResourceKind, expected: Layout) -> dict[str, Tensor]:
    """The tensors of a bundle, once it is clear that they are the model's."""
    name = tensor_pb2.ResourceKind.Name(kind)
    if (bundle := bundles.get(kind)) is None:
        raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"expected a resource {name}, the assignment has none")
    if difference := expected.difference(bundle.layout):
        raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"{name}, the model here against the coordinator's: {difference}")
    try:
        return unpack(bundle.data, bundle.layout)
    except LayoutError as error:
        raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"{name}: {error}") from error


def _check_finite(result: LocalResult) -> None:
    if not math.isfinite(result.loss):
        raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected a finite training loss, got {result.loss}")
    for name, tensor in (*result.delta.items(), *result.buffers.items()):
        # One reduction finds nearly every case; only where it does not hold is each element looked at.
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected finite values, got others in {name}")


@contextmanager
def _failures() -> Iterator[None]:
    """Whatever the task's code, torch or the device raises, as a failure that the coordinator hears of."""
    try:
        yield
    except (Interrupted, WorkFailed):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise WorkFailed(pb.FAILURE_REASON_RESOURCES, f"out of memory: {error}") from error
    except Exception as error:
        raise WorkFailed(pb.FAILURE_REASON_TASK_ERROR, f"{type(error).__name__}: {error}") from error
