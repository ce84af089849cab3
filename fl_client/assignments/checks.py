"""What an assignment asks for, held to what can be done at all and to what this device's owner allows.

All of it is decided from the message alone, before anything is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from algorithms.base import LocalSettings
from fl_client.config import LimitsConfig
from fl_client.connection.reading import text
from fl_client.errors import ClientError, WorkFailed
from fl_client.updates import Key, key_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import check_id
from tasks.batches import count_steps

MOST_PARAMETERS, MOST_PAYLOADS, MOST_ENCODINGS = 64, 16, 64
"""In one assignment; no method and no coordinator has so many."""
NAME_CHARS = 64
_DIGEST_BYTES = 32
_KINDS = frozenset(
    {tensor_pb2.RESOURCE_KIND_MODEL, tensor_pb2.RESOURCE_KIND_DIRECTION, tensor_pb2.RESOURCE_KIND_FROZEN}
)


class UnusableEvent(ClientError):
    """An event that names nothing that could be answered for."""


def checked_key(key: training_pb2.ExchangeKey) -> Key:
    """The key, if its run can have that name. Raises UnusableEvent."""
    checked_run(key.run_id)
    return key_of(key)


def checked_run(run_id: str) -> str:
    """The run's id, if a run can have it. Raises UnusableEvent."""
    try:
        return check_id("run id", run_id)
    except ValueError as error:
        raise UnusableEvent(str(error)) from None


def checked_outcome(outcome: training_pb2.Outcome) -> Key:
    """The key of an outcome that a client state can be made by. Raises UnusableEvent."""
    key = checked_key(outcome.key)
    if len(outcome.digest.value) not in (0, _DIGEST_BYTES):
        raise UnusableEvent(f"outcome: expected a digest of {_DIGEST_BYTES} bytes, got {len(outcome.digest.value)}")
    if not 0.0 <= outcome.clip_factor <= 1.0:
        raise UnusableEvent(f"outcome: expected a clip factor from 0 to 1, got {outcome.clip_factor}")
    return key


def check_assignment(assignment: training_pb2.Assignment, limits: LimitsConfig, examples: int) -> None:
    """Raises WorkFailed for values that mean nothing, and for more work than this device may be given.

    examples: of this device's shard.
    """
    check_resources(assignment.resources)
    for what, count, most in (
        ("payloads", len(assignment.payloads), MOST_PAYLOADS),
        ("upload_encodings", len(assignment.upload_encodings), MOST_ENCODINGS),
    ):
        if count > most:
            raise _unsupported(f"{what}: expected at most {most}, got {count}")
    _check_algorithm(assignment.training.algorithm)
    _check_counted(assignment)
    _check_work(assignment.training, limits, examples)


def check_resources(resources: Sequence[tensor_pb2.Resource]) -> None:
    """Raises WorkFailed unless each is of a kind that is known here, and no two of one kind."""
    if len(resources) > len(_KINDS):
        raise _unsupported(f"resources: expected at most {len(_KINDS)}, got {len(resources)}")
    kinds = [resource.kind for resource in resources]
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise _unsupported(f"resources: expected MODEL, DIRECTION and FROZEN, got kind number {unknown[0]}")
    if len(set(kinds)) < len(kinds):
        raise _unsupported("resources: expected each kind once, got one twice")


def _check_algorithm(spec: training_pb2.AlgorithmSpec) -> None:
    """Names and plain values only; what they mean is looked up in the registry of methods, and nowhere else."""
    fields = spec.parameters.fields
    if len(spec.name) > NAME_CHARS or any(len(name) > NAME_CHARS for name in fields):
        raise _unsupported(f"algorithm: expected names of at most {NAME_CHARS} characters, got {text(spec.name, 80)!r}")
    if len(fields) > MOST_PARAMETERS:
        raise _unsupported(f"algorithm: expected at most {MOST_PARAMETERS} parameters, got {len(fields)}")
    for name, value in fields.items():
        match value.WhichOneof("kind"):
            case "bool_value":
                continue
            case "number_value" if math.isfinite(value.number_value):
                continue
            case "string_value" if len(value.string_value) <= NAME_CHARS:
                continue
            case kind:
                raise _unsupported(
                    f"algorithm parameter {text(name)!r}: expected a finite number, true, false or a word, got"
                    f" {kind or 'nothing'}"
                )


def _check_counted(assignment: training_pb2.Assignment) -> None:
    if not assignment.HasField("counted"):
        return
    try:
        key = checked_outcome(assignment.counted)
    except UnusableEvent as error:
        raise _unsupported(f"counted: {error}") from None
    if key[0] != assignment.key.run_id:
        raise _unsupported("counted: expected an update of the assignment's own run, got another's")


def _check_work(training: training_pb2.LocalTraining, limits: LimitsConfig, examples: int) -> None:
    try:
        LocalSettings(training.learning_rate, training.weight_decay, training.max_gradient_norm)
    except ValueError as error:
        raise _unsupported(f"training: {error}") from None
    unit = training.WhichOneof("work")
    if unit is None:
        raise _unsupported("training: expected local_epochs or local_steps, got neither")
    amount, size = getattr(training, unit), training.batch_size
    if amount < 1 or size < 1:
        raise _unsupported(f"training: expected {unit} and batch_size of 1 or more, got {amount} and {size}")
    if min(size, examples) > limits.max_batch_size:
        raise _over_limit(
            f"batches of at most {limits.max_batch_size} examples (limits.max_batch_size)", min(size, examples)
        )
    steps = count_steps(examples, size, **{unit.removeprefix("local_"): amount})
    if steps > limits.max_steps:
        raise _over_limit(f"at most {limits.max_steps} steps (limits.max_steps)", steps)


def _unsupported(message: str) -> WorkFailed:
    return WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, message)


def _over_limit(expected: str, came: int) -> WorkFailed:
    return WorkFailed(pb.FAILURE_REASON_RESOURCES, f"training: this device's owner allows {expected}, got {came}")
