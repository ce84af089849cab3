"""The work that a client is sent, made from a run's configuration and the round it is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.struct_pb2 import Struct

import algorithms as fl
from fl_server.broadcast import Broadcast
from fl_server.run_config import RunConfig
from fl_server.sampling import training_seed
from protos.fl.v1 import training_pb2 as pb
from protos.fl.v1.tensor_pb2 import ENCODING_PLAIN
from protos.wire import payload_kind


@dataclass(frozen=True, slots=True)
class Order:
    """What is the same for everybody in a round."""

    run_id: str
    config: RunConfig
    algorithm: fl.Algorithm
    fingerprint: tuple[str, str]
    """(version, source) of the coordinator's task."""
    broadcasts: Sequence[Broadcast]
    max_update_bytes: int
    state_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run an assignment stands."""

    round: int
    exchange: int
    attempt: int
    seconds_left: float
    """Until the attempt's deadline."""


def assignment(order: Order, place: Place, client: str, counted: pb.Outcome | None = None) -> pb.Assignment:
    """One client's work for one exchange. counted: the outcome that its state is made by, where it keeps one."""
    message = pb.Assignment(
        key=pb.ExchangeKey(run_id=order.run_id, round=place.round, exchange=place.exchange),
        attempt=place.attempt,
        task=order.config.task.name,
        fingerprint=pb.TaskFingerprint(version=order.fingerprint[0], source=order.fingerprint[1]),
        resources=[broadcast.resource for broadcast in order.broadcasts],
        training=_training(order, place.round, client),
        payloads=[payload_kind(payload) for payload in order.algorithm.exchanges[place.exchange].payloads],
        state_epoch=order.state_epoch,
        upload_encodings=[ENCODING_PLAIN],
        max_update_bytes=order.max_update_bytes,
        counted=counted,
    )
    message.deadline.FromMilliseconds(max(0, round(place.seconds_left * 1000)))
    return message


def _training(order: Order, round_: int, client: str) -> pb.LocalTraining:
    local = order.config.local
    parameters = Struct()
    parameters.update(dict(order.algorithm.parameters))
    training = pb.LocalTraining(
        algorithm=pb.AlgorithmSpec(name=order.config.algorithm.name, parameters=parameters),
        learning_rate=local.learning_rate_in(round_),
        batch_size=local.batch_size,
        weight_decay=local.weight_decay,
        max_gradient_norm=local.max_gradient_norm,
        seed=training_seed(order.config.seed, round_, client),
        population=order.config.population,
        population_examples=order.config.population_examples,
    )
    if local.steps:
        training.local_steps = local.steps
    else:
        training.local_epochs = local.epochs or 1
    return training
