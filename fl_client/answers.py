"""Between a method's payloads and the bytes of an update: what an assignment wants, and how an answer is packed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict
from torch import Tensor

import algorithms
from algorithms.base import Algorithm, ClientUpdate, Exchange, Tensors
from fl_client.errors import WorkFailed
from fl_client.updates import Update, name_of, work_of
from protos.codec import Buffer, Layout, digest_message, digest_of, pieces_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import payload_kind


def method_of(training: training_pb2.LocalTraining) -> Algorithm:
    """The method that an assignment names. Raises WorkFailed when there is none such here."""
    spec = training.algorithm
    try:
        return algorithms.build(spec.name, **MessageToDict(spec.parameters))
    except (ValueError, TypeError, LookupError, JsonError) as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"algorithm {spec.name!r}: {error}") from error


def exchange_of(assignment: training_pb2.Assignment, algorithm: Algorithm) -> Exchange:
    """The exchange that is to be answered. Raises WorkFailed, before any work, for what could not be answered."""
    number = assignment.key.exchange
    if number >= len(algorithm.exchanges):
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"exchange: expected 0 to {len(algorithm.exchanges) - 1} of {algorithm.name!r}, got {number}",
        )
    exchange = algorithm.exchanges[number]
    made = [payload_kind(payload) for payload in exchange.payloads]
    if list(assignment.payloads) != made:
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"payloads: expected {_names(made)} for exchange {number} of {algorithm.name!r}, got"
            f" {_names(assignment.payloads)}",
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
    """Raises WorkFailed if the answer of a model that came down in this layout will be over the coordinator's limit."""
    trainable = max((entry.end for entry in model.entries if entry.trainable), default=0)  # these lie in front
    sizes = [model.size_bytes if payload == "delta" else trainable for payload in exchange.payloads]
    if 0 < assignment.max_update_bytes < sum(sizes):
        raise WorkFailed(
            pb.FAILURE_REASON_RESOURCES,
            f"expected an update of at most {assignment.max_update_bytes} bytes, this model's has {sum(sizes)}: raise"
            " the coordinator's limit",
        )


def check_finite(answer: ClientUpdate) -> None:
    """Raises WorkFailed if the loss or a number that would be sent is a NaN or an infinity."""
    if answer.loss is not None and not math.isfinite(answer.loss):
        raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected a finite training loss, got {answer.loss}")
    for name, tensor in _all_tensors(answer):
        # One reduction finds nearly every case; only where it does not hold is each element looked at.
        if not math.isfinite(tensor.sum().item()) and not torch.isfinite(tensor).all():
            raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"expected finite values, got others in {name}")


def update_of(assignment: training_pb2.Assignment, answer: ClientUpdate, examples: int, seconds: float) -> Update:
    """The answer as it goes up: its payloads one behind the other, deltas of a model with its buffers' final values.

    examples: n_i; seconds: of training.
    """
    payloads: list[training_pb2.Payload] = []
    pieces: list[Buffer] = []
    for payload, tensors in answer.payloads.items():
        laid_out = {**tensors, **answer.buffers} if payload == "delta" else tensors
        layout = Layout.of(laid_out, tensors.keys())
        payloads.append(training_pb2.Payload(kind=payload_kind(payload), manifest=layout.to_manifest()))
        pieces += pieces_of(laid_out, layout)
    header = training_pb2.UpdateHeader(
        key=assignment.key,
        attempt=assignment.attempt,
        payloads=payloads,
        size_bytes=sum(payload.manifest.size_bytes for payload in payloads),
        digest=digest_message(digest_of(*pieces)),
        num_examples=examples,
        num_steps=answer.steps,
        training_loss=answer.loss,
        training_seconds=seconds,
        state_epoch=assignment.state_epoch,
    )
    return Update(work_of(assignment), header, tuple(pieces))


def _all_tensors(answer: ClientUpdate) -> Iterator[tuple[str, Tensor]]:
    parts: list[tuple[str, Tensors]] = [*answer.payloads.items(), ("buffers", answer.buffers)]
    return ((f"{part} {name}", tensor) for part, tensors in parts for name, tensor in tensors.items())


def _names(kinds: Iterable[training_pb2.PayloadKind]) -> str:
    return ", ".join(name_of(training_pb2.PayloadKind, kind) for kind in kinds) or "none"
