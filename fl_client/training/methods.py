"""How an assignment trains: methods and optimizers from outside, the settings of the local steps, and their batches.

Code from outside is loaded once at the start, by the device's own settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import structlog
from google.protobuf.struct_pb2 import Struct, Value

from algorithms import names
from algorithms.base import Algorithm, Exchange, LocalSettings
from algorithms.client import LocalData
from algorithms.gradients import Processes
from algorithms.optimizers.classes import Known
from algorithms.optimizers.spec import OptimizerSpec, OptimizerValue, RateSchedule
from algorithms.parameters import AlgorithmError
from fl_client.connection.messages import log_text
from fl_client.errors import ConfigError, WorkFailed, unsupported
from fl_extensions.methods import METHODS, load_method, load_optimizers
from fl_extensions.naming import installed
from fl_tasks.base import Task
from fl_tasks.batches import count_steps, ordered_batches, raw_batches
from fl_tasks.data.forms import Data, forward_of
from fl_tasks.own_loop import MAX_EPOCHS
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from protos.wire import numbers

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
            **shared(training, LocalSettings), schedule=_schedule_of(training), scaled_loss=scaled_loss
        )
    except ValueError as error:
        raise _unsupported(str(error)) from None


def shared(training: training_pb2.LocalTraining, settings: type) -> dict[str, Any]:
    """The numbers of the ordered training that a dataclass has fields for."""
    given = numbers(training)
    return {field.name: given[field.name] for field in fields(settings) if field.name in given}


def work_of(training: training_pb2.LocalTraining) -> dict[str, int | None]:
    """The ordered work as `epochs` or `steps`; the other one is None."""
    unit = training.WhichOneof("work")
    return {
        "epochs": training.local_epochs if unit == "local_epochs" else None,
        "steps": training.local_steps if unit == "local_steps" else None,
    }


def ordered_data(  # noqa: PLR0913, PLR0917 - what the batches depend on
    task: Task,
    data: Data,
    training: training_pb2.LocalTraining,
    exchange: Exchange,
    start: tuple[int, int],
    processes: Processes | None,
) -> tuple[LocalData, int]:
    """The examples in batches, and the number of batches: of a full gradient, then of steps.

    start: seed of the order of the examples, and batches of it that were read before.
    """
    size, work, own_batches = training.batch_size, work_of(training), data.own_batches
    steps, finish = raw_batches(data, size, start[0], **work, start=start[1])
    total = count_steps(len(data), size, epochs=1, own_batches=own_batches) if exchange.passes else 0
    count = count_steps(len(data), size, own_batches=own_batches, **work) if exchange.trains else 0
    # With one epoch its mean loss is the training loss.
    several = 1 < training.local_epochs <= MAX_EPOCHS
    epoch = count_steps(len(data), size, epochs=1, own_batches=own_batches) if several else 0
    whole, forward = ordered_batches(data, size), forward_of(task)
    local = LocalData(
        steps, whole, task.loss, forward, steps=count, epoch_steps=epoch, finish=finish, processes=processes
    )
    return local, total + count


def omega_of(algorithm: Algorithm, training: training_pb2.LocalTraining, examples: int) -> float:
    """omega_i = N n_i / sum n over the population; 1 if not weighted by examples. Raises WorkFailed."""
    if algorithm.objective == "uniform":
        return 1.0
    if not training.population or not training.population_examples:
        raise _unsupported(
            f"training: expected population and population_examples over 0 for {algorithm.name} with objective ="
            f" 'examples', got {training.population} and {training.population_examples}"
        )
    return training.population * examples / training.population_examples


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
    end = given.end if given.HasField("end") else None
    return RateSchedule(kind, given.warmup, end, training.schedule_start, training.schedule_steps)


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
            member.WhichOneof("kind") == "number_value" and math.isfinite(member.number_value)
            for member in value.list_value.values
        ):
            return tuple(member.number_value for member in value.list_value.values)
        case kind:
            raise _unsupported(
                f"optimizer parameter {log_text(name)!r}: expected a finite number, true, false, a short text or a"
                f" list of at most {MAX_LIST} numbers, got {kind or 'nothing'}"
            )


def _unsupported(message: str) -> WorkFailed:
    return unsupported(f"training: {message}")


log = structlog.get_logger()

Methods = Mapping[str, training_pb2.TaskFingerprint]
"""The fingerprint of each method's code, by the method's name."""
NO_METHODS: Methods = MappingProxyType({})


def load_methods(listed: Sequence[str]) -> Methods:
    """Load the methods that installed packages register, and those that the device's settings list.

    An installed method that cannot be loaded is left out, with a warning. Raises ConfigError for a listed one.
    """
    fingerprints: dict[str, training_pb2.TaskFingerprint] = {}
    for name in [*installed(METHODS), *listed]:
        try:
            code = load_method(name)
        except AlgorithmError as error:
            if name in listed:
                raise ConfigError(f"algorithms: {error}") from error
            log.warning("method_not_loaded", method=name, error=str(error), todo="repair or uninstall its package")
            continue
        if code is not None:
            fingerprints[name] = training_pb2.TaskFingerprint(version=code.version, source=code.source)
    return fingerprints


def load_optimizers_of(listed: Sequence[str]) -> Known:
    """Load the optimizers that the device's settings list. Raises ConfigError for one that cannot be used."""
    try:
        return load_optimizers(listed)
    except AlgorithmError as error:
        raise ConfigError(f"optimizers: {error}") from error


def offers(methods: Methods) -> list[pb.MethodOffer]:
    """The methods as a registration offers them."""
    return [pb.MethodOffer(name=name, fingerprint=methods[name]) for name in sorted(methods)]


def check_method(spec: training_pb2.AlgorithmSpec, methods: Methods) -> None:
    """Raises WorkFailed unless the method is built in, or is here with the coordinator's code."""
    if spec.name in names():
        return
    here = methods.get(spec.name)
    if here is None:
        raise unsupported(
            f"algorithm {spec.name!r}: expected a built-in one ({', '.join(names())}) or one of this device's own"
            f" ({', '.join(sorted(methods)) or 'none'}): install its package here, or list it under `algorithms` in"
            " client.toml"
        )
    if spec.fingerprint != here:
        raise WorkFailed(
            pb.FAILURE_REASON_FINGERPRINT,
            f"algorithm {spec.name}: expected the coordinator's code, version {spec.fingerprint.version!r}"
            f" {spec.fingerprint.source}, got version {here.version!r} {here.source} here: install the same version on"
            " both sides",
        )
