"""Checks of the payloads that an assignment asks for, and packing of computed payloads into an update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict
from torch import Tensor

import algorithms
from algorithms.base import Algorithm, ClientUpdate, Exchange, Payload, Tensors
from algorithms.optimizers.classes import NO_CLASSES, Known
from algorithms.optimizers.federated import with_optimizer
from algorithms.parameters import AlgorithmError
from fl_client.connection.messages import log_text
from fl_client.errors import WorkFailed
from fl_client.storage.pending_updates import Update, name_of, work_digest
from fl_client.training.local_steps import optimizer_of
from fl_client.training.methods import NO_METHODS, Methods, check_method
from protos.codec import Buffer, Layout, digest_message, digest_of, pieces_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import MAX_PAYLOAD_NAME, payload_kind, payload_name


def method_of(
    training: training_pb2.LocalTraining, methods: Methods = NO_METHODS, optimizers: Known = NO_CLASSES
) -> Algorithm:
    """The method that an assignment names, with its local optimizer.

    Raises WorkFailed if it is unknown, or if its code differs here.

    methods: those from outside on this device. optimizers: classes of other packages that this device's settings list.
    """
    spec = training.algorithm
    check_method(spec, methods)
    try:
        algorithm = algorithms.build(spec.name, **MessageToDict(spec.parameters))
    except (ValueError, TypeError, LookupError, JsonError) as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"algorithm {spec.name!r}: {error}") from error
    optimizer = optimizer_of(training)
    try:
        return with_optimizer(algorithm, optimizer, optimizers)
    except AlgorithmError as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"optimizer {optimizer.name!r}: {error}") from error


def check_loop(algorithm: Algorithm) -> None:
    """Raises WorkFailed if a training loop of the task's own cannot make the method's steps, not even inexactly."""
    if why := algorithm.loop_conflict(inexact=True):
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"algorithm {algorithm.name!r}: expected another method for a task that has its own training loop: {why}",
        )


def exchange_of(assignment: training_pb2.Assignment, algorithm: Algorithm) -> Exchange:
    """The exchange of an assignment. Raises WorkFailed, before any work, if this device cannot answer it."""
    number = assignment.key.exchange
    if number >= len(algorithm.exchanges):
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"exchange: expected 0 to {len(algorithm.exchanges) - 1} of {algorithm.name!r}, got {number}",
        )
    exchange = algorithm.exchanges[number]
    offered = [payload_kind(payload) for payload in exchange.payloads]
    named = [name for name in map(payload_name, exchange.payloads) if name]
    if list(assignment.payloads) != offered or list(assignment.payload_names) != named:
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"payloads: expected {_names(offered, named)} for exchange {number} of {algorithm.name!r}, got"
            f" {_names(assignment.payloads, assignment.payload_names)}",
        )
    if assignment.upload_encodings and tensor_pb2.ENCODING_PLAIN not in assignment.upload_encodings:
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"upload_encodings: expected PLAIN among them, got {list(assignment.upload_encodings)}",
        )
    if assignment.training.WhichOneof("work") is None:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, "training: expected local_epochs or local_steps, got neither")
    return exchange


def check_size(assignment: training_pb2.Assignment, exchange: Exchange, model: Layout) -> None:
    """Raises WorkFailed if the update of a model with this layout will exceed the coordinator's limit."""
    trainable = max((entry.end for entry in model.entries if entry.trainable), default=0)  # these come first
    sizes = [model.size_bytes if payload == "delta" else trainable for payload in exchange.payloads]
    if 0 < assignment.max_update_bytes < sum(sizes):
        raise WorkFailed(
            pb.FAILURE_REASON_RESOURCES,
            f"expected an update of at most {assignment.max_update_bytes} bytes, this model needs {sum(sizes)}: raise"
            " the coordinator's limit",
        )


def check_finite(update: ClientUpdate) -> None:
    """Raises WorkFailed if the loss or a value of a payload is NaN or infinite."""
    check_finite_metrics(update)
    for name, tensor in _all_tensors(update):
        # A finite sum proves finite values. Each element is checked only if the sum is not finite.
        if not math.isfinite(tensor.sum().item()) and not torch.isfinite(tensor).all():
            raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected finite values, got others in {name}")


def check_finite_metrics(update: ClientUpdate) -> None:
    """Raises WorkFailed if the loss or a metric of an epoch is NaN or infinite."""
    if update.loss is not None and not math.isfinite(update.loss):
        raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected a finite training loss, got {update.loss}")
    for number, values in enumerate(update.epochs):
        if bad := [name for name, value in values.items() if not math.isfinite(value)]:
            came = f"{bad[0]} = {values[bad[0]]} in epoch {number}"
            raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected finite metrics of local epochs, got {came}")


def pack_update(assignment: training_pb2.Assignment, computed: ClientUpdate, examples: int, seconds: float) -> Update:
    """Pack the payloads in order.

    examples: n_i; seconds: of training.
    """
    parts = laid_out(computed)
    pieces: list[Buffer] = [piece for part in parts for piece in pieces_of(part.tensors, part.layout)]
    header = header_of(assignment, computed, parts, digest_of(*pieces))
    header.num_examples, header.training_seconds = examples, seconds
    return Update(work_digest(assignment), header, tuple(pieces))


class PlacedPayload(NamedTuple):
    """A payload of an update, with the layout of its bytes."""

    payload: Payload
    tensors: Tensors
    layout: Layout


def laid_out(computed: ClientUpdate) -> list[PlacedPayload]:
    """The payloads in order. The delta of a model has the final values of its buffers too."""
    placed = []
    for payload, tensors in computed.payloads.items():
        whole = {**tensors, **computed.buffers} if payload == "delta" else tensors
        placed.append(PlacedPayload(payload, whole, Layout.of(whole, tensors.keys())))
    return placed


def header_of(
    assignment: training_pb2.Assignment, computed: ClientUpdate, parts: Sequence[PlacedPayload], digest: bytes
) -> training_pb2.UpdateHeader:
    """The header of an update with these payloads, without the client's number of examples and its time."""
    return training_pb2.UpdateHeader(
        key=assignment.key,
        attempt=assignment.attempt,
        payloads=[
            training_pb2.Payload(
                kind=payload_kind(part.payload), manifest=part.layout.to_manifest(), name=payload_name(part.payload)
            )
            for part in parts
        ],
        size_bytes=sum(part.layout.size_bytes for part in parts),
        digest=digest_message(digest),
        num_steps=computed.steps,
        training_loss=computed.loss,
        state_epoch=assignment.state_epoch,
        epochs=[training_pb2.EpochMetrics(values=values) for values in computed.epochs],
    )


def _all_tensors(update: ClientUpdate) -> Iterator[tuple[str, Tensor]]:
    parts: list[tuple[str, Tensors]] = [*update.payloads.items(), ("buffers", update.buffers)]
    return ((f"{part} {name}", tensor) for part, tensors in parts for name, tensor in tensors.items())


def _names(kinds: Iterable[training_pb2.PayloadKind], names: Iterable[str]) -> str:
    shown = ", ".join(name_of(training_pb2.PayloadKind, kind) for kind in kinds) or "none"
    named = ", ".join(log_text(name, MAX_PAYLOAD_NAME) for name in names)
    return f"{shown} ({named})" if named else shown
