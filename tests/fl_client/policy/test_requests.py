"""Assignments as requests: amounts, sizes, and fields that this version does not know."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, cast

import algorithms
from fl_client.policy.rules import UNKNOWN_WORK, OrderedWork, ShardSize
from fl_client.policy.site import bytes_up, evaluation_request, ordered_work, training_request, unknown_fields
from protos.fl.v1 import tensor_pb2, training_pb2

MODEL, DIRECTION, FROZEN = (
    tensor_pb2.RESOURCE_KIND_MODEL,
    tensor_pb2.RESOURCE_KIND_DIRECTION,
    tensor_pb2.RESOURCE_KIND_FROZEN,
)
NEW_FIELD = b"\xf8\x07\x01"
"""Field 127 of an unknown message: the number 1."""


def assignment(**work: int) -> training_pb2.Assignment:
    """An assignment of SCAFFOLD's kind: two payloads, three resources."""
    sizes = ((MODEL, 100), (DIRECTION, 90), (FROZEN, 30))
    return training_pb2.Assignment(
        task="digits",
        fingerprint=training_pb2.TaskFingerprint(source="sha256:x"),
        training=training_pb2.LocalTraining(
            algorithm=training_pb2.AlgorithmSpec(name="scaffold"),
            batch_size=4,
            **cast(Any, work or {"local_epochs": 2}),
        ),
        resources=[tensor_pb2.Resource(kind=kind, size_bytes=size) for kind, size in sizes],
        payloads=[training_pb2.PAYLOAD_KIND_DELTA, training_pb2.PAYLOAD_KIND_VARIATE_CHANGE],
    )


def work_in(given: training_pb2.Assignment) -> OrderedWork:
    """The work of an assignment on ten examples."""
    return ordered_work(given.training, algorithms.build("scaffold").exchanges[0], ShardSize(10))


def test_a_request_has_what_the_rules_judge() -> None:
    """Work by the local examples; the model with its frozen part, without the direction."""
    request = training_request(assignment(), work_in(assignment()))
    assert request.work is not None
    assert (request.task, request.source, request.algorithm, request.model_bytes) == (
        "digits", "sha256:x", "scaffold", 130,
    )  # fmt: skip
    assert (request.work.steps, request.work.epochs, request.work.examples) == (6, Fraction(2), 20)
    by_steps = work_in(assignment(local_steps=4))
    assert (by_steps.steps, by_steps.epochs, by_steps.examples) == (4, Fraction(4, 3), 14)
    assert bytes_up(assignment()) == 200


def test_unknown_fields_are_found_wherever_they_are() -> None:
    """In the message, in a message of it, in an entry of a list, and in a value of a map."""
    nested = assignment()
    nested.MergeFromString(NEW_FIELD)
    nested.training.MergeFromString(NEW_FIELD)
    nested.resources[1].MergeFromString(NEW_FIELD)
    nested.training.algorithm.schedules["rho"].MergeFromString(NEW_FIELD)
    assert unknown_fields(nested) == (
        "Assignment.127, Assignment.resources.127, Assignment.training.127, Assignment.training.algorithm.schedules.127"
    )
    assert unknown_fields(assignment()) == ""
    many = assignment()
    many.MergeFromString(b"".join(bytes([0x80 | number % 16 << 3, 7, 1]) for number in range(8)))
    assert unknown_fields(many).endswith(" and 3 more")


def test_an_evaluation_has_no_work() -> None:
    """Only task, code and model."""
    message = training_pb2.EvaluationAssignment(task="digits", resources=assignment().resources[:1])
    message.MergeFromString(NEW_FIELD)
    request = evaluation_request(message)
    assert (request.kind, request.work, request.model_bytes) == ("evaluation", UNKNOWN_WORK, 100)
    assert request.unknown == "EvaluationAssignment.127"
