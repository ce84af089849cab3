"""Packing of computed payloads into an update, in the encoding that the assignment names.

The coordinator adds the decoded values, so a client state is computed from these and not from those that were encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from algorithms.base import ClientUpdate, Payload, Tensors
from algorithms.reference import KnownPart
from fl_client.errors import WorkFailed
from fl_client.storage.pending_updates import Update, work_digest
from protos.codec import Buffer, Layout, digest_message, digest_of, pieces_of
from protos.encodings import PLAIN, EncodedLayout, EncodingError, EncodingSpec, decode, encode, encoding_key
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import payload_kind, payload_name


def encoding_of(assignment: training_pb2.Assignment) -> EncodingSpec:
    """The first encoding of an assignment that this device can write. Raises WorkFailed if there is none."""
    refused = ""
    for number in assignment.upload_encodings or [tensor_pb2.ENCODING_PLAIN]:
        try:
            return EncodingSpec.from_wire(number, assignment.upload_fraction)
        except ValueError as error:
            refused = refused or str(error)
    raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"upload_encodings: {refused}")


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
    """Pack the payloads in order. Raises WorkFailed for a value that the encoding cannot have.

    examples: n_i; seconds: of training; known: the part of the delta that is not sent.
    """
    if known is not None:
        computed = _with_delta(computed, known.removed_from(computed.payloads["delta"]))
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
        raise WorkFailed(pb.FAILURE_REASON_NOT_FINITE, f"{part.payload}: {error}") from error


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
