"""Payloads: the checks of those that an assignment asks for, and their packing into an update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict
from torch import Tensor

import algorithms
from algorithms import tree
from algorithms.base import Algorithm, ClientUpdate, Exchange, Payload, Tensors
from algorithms.optimizers.classes import NO_CLASSES, Known
from algorithms.optimizers.federated import with_optimizer
from algorithms.parameters import AlgorithmError
from algorithms.privacy.clipping import clipped
from algorithms.reference import KnownPart
from fl_client.connection.messages import log_text
from fl_client.errors import beyond_limits, not_finite, unsupported
from fl_client.storage.pending_updates import Update, name_of, work_digest
from fl_client.training.methods import NO_METHODS, Methods, check_method, optimizer_of
from protos.codec import Buffer, Layout, digest_message, digest_of, pieces_of
from protos.encodings import PLAIN, EncodedLayout, EncodingError, EncodingSpec, decode, encode, encoding_key
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import MAX_PAYLOAD_NAME, payload_kind, payload_name


def encoding_of(assignment: training_pb2.Assignment) -> EncodingSpec:
    """The first encoding of an assignment that this device can write. Raises WorkFailed if there is none."""
    refused = ""
    for number in assignment.upload_encodings or [tensor_pb2.ENCODING_PLAIN]:
        try:
            return EncodingSpec.from_wire(number, assignment.upload_fraction)
        except ValueError as error:
            refused = refused or str(error)
    raise unsupported(f"upload_encodings: {refused}")


class PlacedPayload(NamedTuple):
    """A payload of an update, with the layout of its bytes."""

    payload: Payload
    tensors: Tensors
    layout: Layout
    """The layout of the tensors without an encoding."""
    encoded: EncodedLayout


def laid_out(computed: ClientUpdate, encoding: EncodingSpec = PLAIN) -> list[PlacedPayload]:
    """The payloads in order. The delta of a model has the final values of its buffers too."""
    placed = []
    for payload, tensors in computed.payloads.items():
        whole = {**tensors, **computed.buffers} if payload == "delta" else tensors
        layout = Layout.of(whole, tensors.keys())
        encoded = EncodedLayout.of(layout, encoding.of_payload(payload))
        placed.append(PlacedPayload(payload, whole, layout, encoded))
    return placed


def pack_update(  # noqa: PLR0913, PLR0917 - what a header has
    assignment: training_pb2.Assignment,
    computed: ClientUpdate,
    examples: int,
    seconds: float,
    known: KnownPart | None = None,
) -> Update:
    """Pack the payloads in order, the delta clipped if asked. Raises WorkFailed for a value that no encoding can have.

    examples: n_i; seconds: of training; known: the part of the delta that is not sent.
    """
    if known is not None:
        computed = _with_delta(computed, known.removed_from(computed.payloads["delta"]))
    if assignment.clip:
        computed = _with_delta(computed, clipped(computed.payloads["delta"], assignment.clip))
    parts = laid_out(computed, encoding_of(assignment))
    pieces: list[Buffer] = [piece for part in parts for piece in _pieces(assignment, part)]
    header = header_of(assignment, computed, parts, digest_of(*pieces))
    header.num_examples, header.training_seconds = examples, seconds
    return Update(work_digest(assignment), header, tuple(pieces))


def _pieces(assignment: training_pb2.Assignment, part: PlacedPayload) -> Sequence[Buffer]:
    """The bytes of a payload; one piece if the update has an encoding."""
    if encoding_of(assignment) == PLAIN:
        return [*pieces_of(part.tensors, part.layout)]
    try:
        return [encode(part.tensors, part.encoded, _key(assignment, part.payload))]
    except EncodingError as error:
        raise not_finite(f"{part.payload}: {error}") from error


def _with_delta(computed: ClientUpdate, delta: Tensors) -> ClientUpdate:
    return replace(computed, payloads={**computed.payloads, "delta": delta})


def as_counted(
    assignment: training_pb2.Assignment, computed: ClientUpdate, update: Update, known: KnownPart | None = None
) -> ClientUpdate:
    """The computed update with the values that the coordinator decodes from its bytes, on the device of its own.

    known: as in `pack_update`.
    """
    if encoding_of(assignment) == PLAIN:
        return computed
    payloads: dict[Payload, Tensors] = {}
    for part, piece in zip(laid_out(computed, encoding_of(assignment)), update.pieces, strict=True):
        decoded = decode(piece, part.encoded, _key(assignment, part.payload))
        sent = computed.payloads[part.payload]
        payloads[part.payload] = {name: decoded[name].to(tensor.device) for name, tensor in sent.items()}
    counted = replace(computed, payloads=payloads)
    return counted if known is None else _with_delta(counted, known.added_to(payloads["delta"]))


def _key(assignment: training_pb2.Assignment, payload: Payload) -> bytes:
    """The key of a payload's random numbers. The training seed depends on run, round and client."""
    return encoding_key(assignment.training.seed, "update", assignment.key.exchange, payload)


def header_of(
    assignment: training_pb2.Assignment, computed: ClientUpdate, parts: Sequence[PlacedPayload], digest: bytes
) -> training_pb2.UpdateHeader:
    """The header of an update with these payloads, without the client's number of examples and its time."""
    return training_pb2.UpdateHeader(
        key=assignment.key,
        attempt=assignment.attempt,
        payloads=[
            training_pb2.Payload(
                kind=payload_kind(part.payload), manifest=part.encoded.to_manifest(), name=payload_name(part.payload)
            )
            for part in parts
        ],
        size_bytes=sum(part.encoded.size_bytes for part in parts),
        digest=digest_message(digest),
        num_steps=computed.steps,
        training_loss=computed.loss,
        state_epoch=assignment.state_epoch,
        epochs=[training_pb2.EpochMetrics(values=values) for values in computed.epochs],
    )


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
        raise unsupported(f"algorithm {spec.name!r}: {error}") from error
    optimizer = optimizer_of(training)
    try:
        return with_optimizer(algorithm, optimizer, optimizers)
    except AlgorithmError as error:
        raise unsupported(f"optimizer {optimizer.name!r}: {error}") from error


def check_loop(algorithm: Algorithm) -> None:
    """Raises WorkFailed if a training loop of the task's own cannot make the method's steps, not even inexactly."""
    if why := algorithm.loop_conflict(inexact=True):
        raise unsupported(
            f"algorithm {algorithm.name!r}: expected another method for a task that has its own training loop: {why}"
        )


def exchange_of(assignment: training_pb2.Assignment, algorithm: Algorithm) -> Exchange:
    """The exchange of an assignment. Raises WorkFailed, before any work, if this device cannot answer it."""
    number = assignment.key.exchange
    if number >= len(algorithm.exchanges):
        raise unsupported(f"exchange: expected 0 to {len(algorithm.exchanges) - 1} of {algorithm.name!r}, got {number}")
    exchange = algorithm.exchanges[number]
    offered = [payload_kind(payload) for payload in exchange.payloads]
    named = [name for name in map(payload_name, exchange.payloads) if name]
    if list(assignment.payloads) != offered or list(assignment.payload_names) != named:
        raise unsupported(
            f"payloads: expected {_names(offered, named)} for exchange {number} of {algorithm.name!r}, got"
            f" {_names(assignment.payloads, assignment.payload_names)}"
        )
    encoding_of(assignment)
    if assignment.training.WhichOneof("work") is None:
        raise unsupported("training: expected local_epochs or local_steps, got neither")
    return exchange


def check_size(assignment: training_pb2.Assignment, exchange: Exchange, model: Layout) -> None:
    """Raises WorkFailed if the update of a model with this layout will exceed the coordinator's limit."""
    encoding = encoding_of(assignment)
    entries = tuple(entry for entry in model.entries if entry.trainable)  # these come first
    trainable = Layout(entries, max((entry.end for entry in entries), default=0))
    size = 0
    for payload in exchange.payloads:
        layout = model if payload == "delta" else trainable
        size += EncodedLayout.of(layout, encoding.of_payload(payload)).size_bytes
    if 0 < assignment.max_update_bytes < size:
        raise beyond_limits(
            f"expected an update of at most {assignment.max_update_bytes} bytes, this model needs {size}: raise"
            " the coordinator's limit"
        )


def check_finite(update: ClientUpdate, buffers: Tensors) -> None:
    """Raises WorkFailed if the loss or a value of a payload is NaN or infinite.

    buffers: as received. One that has not changed may have any values, as masks of minus infinity do.
    """
    check_finite_metrics(update)
    for part, tensors in update.payloads.items():
        if bad := [name for name, tensor in tensors.items() if not _is_finite(tensor)]:
            raise not_finite(f"expected finite values, got others in {part} {bad[0]}")
    for name, tensor in update.buffers.items():
        if not _is_finite(tensor) and not tree.same_bits(tensor, buffers[name]):
            raise not_finite(f"expected finite values in buffers that change in training, got others in buffer {name}")


def _is_finite(tensor: Tensor) -> bool:
    # A finite sum proves finite values. Each element is checked only if the sum is not finite.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def check_finite_metrics(update: ClientUpdate) -> None:
    """Raises WorkFailed if the loss or a metric of an epoch is NaN or infinite."""
    if update.loss is not None and not math.isfinite(update.loss):
        raise not_finite(f"expected a finite training loss, got {update.loss}")
    for number, values in enumerate(update.epochs):
        if bad := [name for name, value in values.items() if not math.isfinite(value)]:
            came = f"{bad[0]} = {values[bad[0]]} in epoch {number}"
            raise not_finite(f"expected finite metrics of local epochs, got {came}")


def _names(kinds: Iterable[training_pb2.PayloadKind], names: Iterable[str]) -> str:
    shown = ", ".join(name_of(training_pb2.PayloadKind, kind) for kind in kinds) or "none"
    named = ", ".join(log_text(name, MAX_PAYLOAD_NAME) for name in names)
    return f"{shown} ({named})" if named else shown
