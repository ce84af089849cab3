"""The Assignment message for a client, made from a run's configuration and its position in the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.struct_pb2 import Struct

import algorithms as fl
from fl_server.aggregation.broadcast import Broadcast
from fl_server.aggregation.methods import (
    learning_rate_in,
    optimizer_spec,
    parameters_in,
    rate_schedule,
    update_encoding,
)
from fl_server.rounds.sampling import training_seed
from fl_server.run_settings.config import AlgorithmSection, RunConfig
from fl_server.run_settings.sections import LocalSection
from protos.fl.v1 import training_pb2 as pb
from protos.fl.v1.tensor_pb2 import Resource
from protos.wire import payload_kind, payload_name


@dataclass(frozen=True, slots=True)
class RoundWork:
    """What is the same for all clients of a round."""

    run_id: str
    config: RunConfig
    algorithm: fl.Algorithm
    fingerprint: tuple[str, str]
    """(version, source) of the coordinator's task."""
    broadcasts: Sequence[Broadcast]
    max_update_bytes: int
    state_epoch: int = 0
    local_frozen: Resource | None = None
    """The frozen parameters that clients have themselves. None if they are among the broadcasts, or there are none."""


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """The attempt that an assignment belongs to."""

    round: int
    exchange: int
    attempt: int
    seconds_left: float
    """Until the attempt's deadline."""


def assignment(
    work: RoundWork, position: RoundPosition, client: str, counted: pb.Outcome | None = None
) -> pb.Assignment:
    """One client's work for one exchange. counted: the outcome of the update that its state is made of, if any."""
    return for_client(
        common_assignment(work, position), training_seed(work.config.seed, position.round, client), counted
    )


def for_client(common: pb.Assignment, seed: int, counted: pb.Outcome | None) -> pb.Assignment:
    """The `common_assignment` with what is the client's own: its training seed, and the outcome of its state."""
    message = pb.Assignment()
    message.CopyFrom(common)
    message.training.seed = seed
    if counted is not None:
        message.counted.CopyFrom(counted)
    return message


def common_assignment(work: RoundWork, position: RoundPosition) -> pb.Assignment:
    """What is the same for all clients of an attempt."""
    payloads, encoding = work.algorithm.exchanges[position.exchange].payloads, update_encoding(work.config)
    message = pb.Assignment(
        key=pb.ExchangeKey(run_id=work.run_id, round=position.round, exchange=position.exchange),
        attempt=position.attempt,
        task=work.config.task.name,
        fingerprint=pb.TaskFingerprint(version=work.fingerprint[0], source=work.fingerprint[1]),
        resources=[broadcast.resource for broadcast in work.broadcasts],
        training=_training(work, position.round),
        payloads=[payload_kind(payload) for payload in payloads],
        payload_names=[name for name in map(payload_name, payloads) if name],
        state_epoch=work.state_epoch,
        upload_encodings=[encoding.wire],
        upload_fraction=encoding.fraction,
        without_direction=work.config.encodings.reference == "direction",
        max_update_bytes=work.max_update_bytes,
        personal=work.config.personal,
        local_frozen=work.local_frozen,
        min_accepted=work.config.round.least,
    )
    message.deadline.FromMilliseconds(max(0, round(position.seconds_left * 1000)))
    return message


def _algorithm(section: AlgorithmSection, parameters: Struct) -> pb.AlgorithmSpec:
    spec = pb.AlgorithmSpec(name=section.name, parameters=parameters)
    if section.fingerprint is not None:
        spec.fingerprint.CopyFrom(pb.TaskFingerprint(**dict(section.fingerprint)))
    return spec


def _training(work: RoundWork, round_: int) -> pb.LocalTraining:
    local = work.config.local
    parameters = Struct()
    parameters.update(parameters_in(work.config, work.algorithm, round_))
    training = pb.LocalTraining(
        algorithm=_algorithm(work.config.algorithm, parameters),
        learning_rate=learning_rate_in(work.config, round_),
        batch_size=local.batch_size,
        weight_decay=local.weight_decay,
        max_gradient_norm=local.max_gradient_norm,
        population=work.config.population,
        population_examples=work.config.population_examples if work.algorithm.objective == "examples" else 0,
    )
    if local.steps:
        training.local_steps = local.steps
    else:
        training.local_epochs = local.epochs or 1
    _set_steps(training, local)
    return training


def _set_steps(training: pb.LocalTraining, local: LocalSection) -> None:
    """Optimizer, schedule and micro-batches, only where they differ from plain SGD."""
    spec, schedule = optimizer_spec(local), rate_schedule(local.schedule)
    if not spec.plain:
        training.optimizer.name, training.optimizer.state = spec.name, spec.state
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.parameters.items()}
        training.optimizer.parameters.update(values)
    if not schedule.constant:
        training.schedule.kind, training.schedule.warmup = schedule.kind, schedule.warmup
        if schedule.end is not None:
            training.schedule.end = schedule.end
    training.micro_batch_size = local.micro_batch_size
