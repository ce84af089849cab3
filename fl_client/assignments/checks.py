"""Checks of a coordinator's events: valid values, and no more work than this device's owner allows.

They read the message alone, before anything is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fl_client.connection.messages import log_text
from fl_client.errors import ClientError, WorkFailed, beyond_limits, unsupported
from fl_client.settings.config import LimitsConfig
from fl_client.storage.pending_updates import Key, key_of
from fl_client.training.methods import optimizer_of, settings_of
from fl_common.names import check_id
from fl_common.units import counted
from fl_tasks.batches import count_steps
from protos.digests import digest_bytes
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import check_payload_name

MAX_PARAMETERS, MAX_PAYLOADS, MAX_ENCODINGS = 64, 16, 64
"""Limits of one assignment, above the needs of any method."""
NAME_CHARS = 64
METHOD_CHARS = 256
"""A method's name may be module:attribute."""
MAX_PATTERNS, PATTERN_CHARS = 64, 256
"""Limits of the patterns of personal parameters."""
_DIGEST_BYTES = 32
_KINDS = frozenset(
    {tensor_pb2.RESOURCE_KIND_MODEL, tensor_pb2.RESOURCE_KIND_DIRECTION, tensor_pb2.RESOURCE_KIND_FROZEN}
)
"""Kinds of which there is one resource; in an evaluation the averaged model may be another. Of the optimizer's state
there may be several, with names."""
MAX_NAMED = 8
"""Named resources of one assignment."""


class InvalidEvent(ClientError):
    """An event whose key, run id or outcome is not valid."""


def checked_key(key: training_pb2.ExchangeKey) -> Key:
    """The key. Raises InvalidEvent if its run id is not valid."""
    checked_run(key.run_id)
    return key_of(key)


def checked_run(run_id: str) -> str:
    """The run's id. Raises InvalidEvent if it is not valid."""
    try:
        return check_id("run id", run_id)
    except ValueError as error:
        raise InvalidEvent(str(error)) from None


def checked_outcome(outcome: training_pb2.Outcome) -> Key:
    """The key of an outcome. Raises InvalidEvent for a digest or clip factor that is not valid."""
    key = checked_key(outcome.key)
    if len(outcome.digest.value) not in (0, _DIGEST_BYTES):
        raise InvalidEvent(f"outcome: expected a digest of {_DIGEST_BYTES} bytes, got {len(outcome.digest.value)}")
    if not 0.0 <= outcome.clip_factor <= 1.0:
        raise InvalidEvent(f"outcome: expected a clip factor from 0 to 1, got {outcome.clip_factor}")
    return key


def check_assignment(
    assignment: training_pb2.Assignment, limits: LimitsConfig, examples: int, own_batches: int = 0
) -> None:
    """Raises WorkFailed for values that are not valid, and for more work than the owner allows.

    examples: number of examples of this device's shard; own_batches: batches of its epoch if the task makes them.
    """
    check_resources(assignment)
    _check_personal(assignment.personal)
    for field, count, limit in (
        ("payloads", len(assignment.payloads), MAX_PAYLOADS),
        ("payload_names", len(assignment.payload_names), MAX_PAYLOADS),
        ("upload_encodings", len(assignment.upload_encodings), MAX_ENCODINGS),
    ):
        if count > limit:
            raise unsupported(f"{field}: expected at most {limit}, got {count}")
    for name in assignment.payload_names:
        try:
            check_payload_name(name)
        except ValueError as error:
            raise unsupported(f"payload_names: {error}") from None
    _check_algorithm(assignment.training.algorithm)
    _check_counted(assignment)
    _check_clip(assignment)
    _check_work(assignment.training, limits, examples, own_batches)


def _check_clip(assignment: training_pb2.Assignment) -> None:
    """Raises WorkFailed for a clip with which the update could still be longer, or tell more than its delta."""
    if assignment.clip == 0.0:
        return
    if not 0.0 < assignment.clip < math.inf:
        raise unsupported(f"clip: expected a number over 0, got {assignment.clip}")
    if list(assignment.payloads) != [training_pb2.PAYLOAD_KIND_DELTA]:
        raise unsupported("clip: expected the delta as the only payload, for others are not clipped")
    if set(assignment.upload_encodings) - {tensor_pb2.ENCODING_PLAIN}:
        raise unsupported("clip: expected the encoding PLAIN, for a decoded update may be longer")


def check_evaluation(assignment: training_pb2.EvaluationAssignment) -> None:
    """Raises WorkFailed for values that are not valid."""
    check_resources(assignment)
    _check_personal(assignment.personal)


def _check_personal(patterns: Sequence[str]) -> None:
    if len(patterns) > MAX_PATTERNS or any(len(pattern) > PATTERN_CHARS for pattern in patterns):
        raise unsupported(
            f"personal: expected at most {MAX_PATTERNS} patterns of at most {PATTERN_CHARS} characters, got"
            f" {len(patterns)} patterns, the longest of {max(map(len, patterns))}"
        )


def check_resources(assignment: training_pb2.Assignment | training_pb2.EvaluationAssignment) -> None:
    """Raises WorkFailed for an unknown kind, two resources of one kind and name, or `local_frozen` without a digest."""
    resources, kinds = assignment.resources, _KINDS
    if isinstance(assignment, training_pb2.EvaluationAssignment):
        kinds = _KINDS | {tensor_pb2.RESOURCE_KIND_AVERAGED}
    if len(resources) > len(_KINDS) + MAX_NAMED:
        raise unsupported(f"resources: expected at most {len(_KINDS) + MAX_NAMED}, got {len(resources)}")
    for resource in resources:
        named = resource.kind == tensor_pb2.RESOURCE_KIND_OPTIMIZER
        if not named and resource.kind not in kinds:
            raise unsupported(
                f"resources: expected MODEL, DIRECTION, FROZEN and OPTIMIZER, got kind number {resource.kind}"
            )
        if bool(resource.name) != named or len(resource.name) > NAME_CHARS:
            raise unsupported(
                f"resources: expected a name of at most {NAME_CHARS} characters for OPTIMIZER and for no other kind, "
                f"got {log_text(resource.name, NAME_CHARS)!r}"
            )
    keys = [(resource.kind, resource.name) for resource in resources]
    if len(set(keys)) < len(keys):
        raise unsupported("resources: expected each kind and name once, got one twice")
    if not assignment.HasField("local_frozen"):
        return
    if (kind := assignment.local_frozen.kind) != tensor_pb2.RESOURCE_KIND_FROZEN:
        raise unsupported(f"local_frozen: expected the kind FROZEN, got kind number {kind}")
    try:
        digest_bytes(assignment.local_frozen.digest)
    except ValueError as error:
        raise unsupported(f"local_frozen: {error}") from None


def _check_algorithm(spec: training_pb2.AlgorithmSpec) -> None:
    """Names and plain values only. Only the registry of methods interprets them."""
    fields = spec.parameters.fields
    for what, name, limit in (
        ("a", spec.name, METHOD_CHARS),
        *(("a parameter's", field, NAME_CHARS) for field in fields),
    ):
        if len(name) > limit:
            raise unsupported(
                f"algorithm: expected {what} name of at most {counted(limit, 'character')}, got {log_text(name, 80)!r}"
            )
    if len(fields) > MAX_PARAMETERS:
        raise unsupported(f"algorithm: expected at most {MAX_PARAMETERS} parameters, got {len(fields)}")
    for name, value in fields.items():
        match value.WhichOneof("kind"):
            case "bool_value":
                continue
            case "number_value" if math.isfinite(value.number_value):
                continue
            case "string_value" if len(value.string_value) <= NAME_CHARS:
                continue
            case kind:
                raise unsupported(
                    f"algorithm parameter {log_text(name)!r}: expected a finite number, true, false or a short text,"
                    f" got {kind or 'nothing'}"
                )


def _check_counted(assignment: training_pb2.Assignment) -> None:
    if not assignment.HasField("counted"):
        return
    try:
        key = checked_outcome(assignment.counted)
    except InvalidEvent as error:
        raise unsupported(f"counted: {error}") from None
    if key[0] != assignment.key.run_id:
        raise unsupported("counted: expected an update of the assignment's own run, got one of another run")


def _check_work(training: training_pb2.LocalTraining, limits: LimitsConfig, examples: int, own_batches: int) -> None:
    settings_of(training)
    optimizer_of(training)
    unit = training.WhichOneof("work")
    if unit is None:
        raise unsupported("training: expected local_epochs or local_steps, got neither")
    amount, size = getattr(training, unit), training.batch_size
    if amount < 1 or size < 1:
        raise unsupported(f"training: expected {unit} and batch_size of 1 or more, got {amount} and {size}")
    if own_batches:
        size = -(-examples // own_batches)
    at_once = min(size, examples, training.micro_batch_size or size)
    if at_once > limits.max_batch_size:
        raise _over_limit(
            f"batches of at most {counted(limits.max_batch_size, 'example')} (limits.max_batch_size)", at_once
        )
    check_amount(count_steps(examples, size, **{unit.removeprefix("local_"): amount}, own_batches=own_batches), limits)


def check_amount(steps: int, limits: LimitsConfig) -> None:
    """Raises WorkFailed for more batches, those of a full gradient included, than the owner allows."""
    if steps > limits.max_steps:
        raise _over_limit(f"at most {counted(limits.max_steps, 'step')} (limits.max_steps)", steps)


def _over_limit(allowed: str, requested: int) -> WorkFailed:
    return beyond_limits(f"training: this device's owner allows {allowed}, got {requested}")
