"""The optimizer, the schedule and the micro-batches of an assignment, as `algorithms` has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from algorithms.base import LocalSettings
from algorithms.optimizers.spec import OptimizerSpec, OptimizerValue, RateSchedule
from algorithms.parameters import AlgorithmError
from fl_client.connection.messages import log_text
from fl_client.errors import WorkFailed
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

MAX_PARAMETERS, MAX_LIST = 64, 16
"""Limits of an optimizer, above the needs of any: parameters, and numbers in one of them."""
MAX_NAME, MAX_TEXT = 256, 64
"""Characters of an optimizer's name, and of a name or text among its parameters."""


def settings_of(training: training_pb2.LocalTraining, *, scaled_loss: bool = False) -> LocalSettings:
    """The settings of the local steps. Raises WorkFailed for values that are not valid.

    scaled_loss: the device computes in float16.
    """
    try:
        return LocalSettings(
            training.learning_rate,
            training.weight_decay,
            training.max_gradient_norm,
            _schedule_of(training),
            training.micro_batch_size,
            scaled_loss,
        )
    except ValueError as error:
        raise _unsupported(str(error)) from None


def optimizer_of(training: training_pb2.LocalTraining) -> OptimizerSpec:
    """The optimizer. Raises WorkFailed for values that are not valid. Nothing is imported."""
    given = training.optimizer
    if not training.HasField("optimizer"):
        return OptimizerSpec()
    if len(given.name) > MAX_NAME:
        raise _unsupported(f"optimizer: expected a name of at most {MAX_NAME} characters, got {len(given.name)}")
    try:
        # AlgorithmError for an unknown state.
        state: Any = log_text(given.state, MAX_TEXT) or "fresh"
        return OptimizerSpec(given.name or "sgd", _values(given.parameters), state)
    except AlgorithmError as error:
        raise _unsupported(f"optimizer {log_text(given.name)}: {error}") from None


def _schedule_of(training: training_pb2.LocalTraining) -> RateSchedule:
    given = training.schedule
    if not training.HasField("schedule"):
        return RateSchedule()
    # AlgorithmError, which is a ValueError, for an unknown kind.
    kind: Any = log_text(given.kind, MAX_TEXT)
    return RateSchedule(kind, given.warmup, given.end if given.HasField("end") else None)


def _values(parameters: Struct) -> Mapping[str, OptimizerValue]:
    fields = parameters.fields
    if len(fields) > MAX_PARAMETERS or any(len(name) > MAX_TEXT for name in fields):
        raise _unsupported(
            f"optimizer: expected at most {MAX_PARAMETERS} parameters with names of at most {MAX_TEXT} characters, got"
            f" {len(fields)}"
        )
    return {name: _value(name, value) for name, value in fields.items()}


def _value(name: str, value: Value) -> OptimizerValue:
    match value.WhichOneof("kind"):
        case "bool_value":
            return value.bool_value
        case "number_value" if math.isfinite(value.number_value):
            return value.number_value
        case "string_value" if len(value.string_value) <= MAX_TEXT:
            return value.string_value
        case "list_value" if len(value.list_value.values) <= MAX_LIST and all(
            each.WhichOneof("kind") == "number_value" and math.isfinite(each.number_value)
            for each in value.list_value.values
        ):
            return tuple(each.number_value for each in value.list_value.values)
        case kind:
            raise _unsupported(
                f"optimizer parameter {log_text(name)!r}: expected a finite number, true, false, a short text or a"
                f" list of at most {MAX_LIST} numbers, got {kind or 'nothing'}"
            )


def _unsupported(message: str) -> WorkFailed:
    return WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"training: {message}")
