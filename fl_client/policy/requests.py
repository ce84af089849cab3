"""What an assignment requests, as the rules see it; and its fields that this version does not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from algorithms.base import Exchange
from fl_client.policy.rules import Request, Shard, Work, work_of
from protos.fl.v1 import tensor_pb2, training_pb2

_OF_MODEL = (tensor_pb2.RESOURCE_KIND_MODEL, tensor_pb2.RESOURCE_KIND_FROZEN)
_SHOWN = 5
"""Unknown fields that a message names."""


def ordered_work(training: training_pb2.LocalTraining, exchange: Exchange, shard: Shard) -> Work:
    """The work of an assignment whose values were checked: of what the exchange of its method makes clients do."""
    by_epochs = training.WhichOneof("work") == "local_epochs"
    amount = {"epochs": training.local_epochs} if by_epochs else {"steps": training.local_steps}
    return work_of(shard, training.batch_size, **amount, passes=exchange.passes, trains=exchange.trains)


def training_request(assignment: training_pb2.Assignment, work: Work | None) -> Request:
    """The request of an assignment. work: by `ordered_work`; None: only its names are judged."""
    training = assignment.training
    return Request(
        kind="names" if work is None else "training",
        task=assignment.task,
        source=assignment.fingerprint.source,
        algorithm=training.algorithm.name,
        optimizer=training.optimizer.name or "sgd",
        work=work,
        min_clients=assignment.min_accepted,
        model_bytes=_model_bytes(assignment),
        unknown=unknown_fields(assignment),
    )


def evaluation_request(assignment: training_pb2.EvaluationAssignment) -> Request:
    """The request of an evaluation."""
    return Request(
        kind="evaluation",
        task=assignment.task,
        source=assignment.fingerprint.source,
        model_bytes=_model_bytes(assignment),
        unknown=unknown_fields(assignment),
    )


def bytes_down(resources: Iterable[tensor_pb2.Resource]) -> int:
    """Bytes of all resources of an assignment."""
    return sum(each.size_bytes for each in resources)


def bytes_up(assignment: training_pb2.Assignment) -> int:
    """Bytes of the update, as far as they are known before the training: one model for each payload."""
    model = sum(each.size_bytes for each in assignment.resources if each.kind == tensor_pb2.RESOURCE_KIND_MODEL)
    return model * len(assignment.payloads)


def unknown_fields(message: Message) -> str:
    """The unknown fields of a message and of all messages in it, by path and number; empty if there are none."""
    found = list(_unknown(message, message.DESCRIPTOR.name))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _unknown(message: Message, path: str) -> Iterator[str]:
    fields = UnknownFieldSet(message)
    yield from (f"{path}.{fields[index].field_number}" for index in range(len(fields)))
    for field, value in message.ListFields():
        for each in _messages(value):
            yield from _unknown(each, f"{path}.{field.name}")


def _messages(value: Any) -> Iterable[Message]:
    """The messages in a field's value: one, a list, or the values of a map."""
    if isinstance(value, Message):
        return (value,)
    if isinstance(value, str | bytes | int | float):
        return ()
    items = value.values() if hasattr(value, "values") else value
    return (each for each in items if isinstance(each, Message))


def _model_bytes(assignment: training_pb2.Assignment | training_pb2.EvaluationAssignment) -> int:
    """Of the model, with the frozen parameters that are sent and those that the device has itself."""
    sent = sum(each.size_bytes for each in assignment.resources if each.kind in _OF_MODEL)
    return sent + assignment.local_frozen.size_bytes
