"""Builds the admission gate of an exchange, for the coordinator and for simulations."""

from __future__ import annotations

from dataclasses import dataclass

from fl_server.admission.buffer_rules import BufferRules, most_counted
from fl_server.admission.client_rules import ExpectedWork, RegisteredData
from fl_server.admission.gate import AdmissionGate
from fl_server.admission.norms import BUFFERS, DELTA, FARTHEST, FLOOR, NO_LIMIT, NormHistory
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import learning_rate_in, local_in
from fl_server.aggregation.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Collecting:
    """The exchange under way."""

    snapshot: Snapshot
    """The model that its clients were sent."""
    exchange: int
    state_epoch: int
    history: NormHistory
    max_bytes: int = 0
    """The most bytes of an update; 0: no limit but the exact size."""


def build_gate(engine: Engine, collecting: Collecting, client: str, registered: RegisteredData) -> AdmissionGate:
    """The gate for a client with this registered data."""
    section, round_, exchange = engine.config.round, collecting.snapshot.round + 1, collecting.exchange
    local = local_in(engine.config, engine.algorithm, round_)
    shape, trains = engine.shape(exchange), engine.algorithm.exchanges[exchange].trains
    ordered = ExpectedWork(registered.examples, local, trains, registered.own_batches, engine.own_loop)
    steps = ordered.steps(max(1, registered.examples))
    # The other payloads are as long as gradients: K_i steps with one move a model as far as a delta.
    model_norm, rate = collecting.snapshot.norm, learning_rate_in(engine.config, round_)
    others = collecting.history.others(section, FLOOR * model_norm / (rate * steps) if rate else 0.0)
    # A batch that the task makes may have any number of the examples.
    largest_batch = registered.examples if registered.own_batches else local.batch_size
    buffers = BufferRules(
        collecting.snapshot.buffers,
        bounded=bool(section.max_relative_payload),
        limit=others.get(BUFFERS, NO_LIMIT),
        most=min(most_counted(steps, registered.examples, largest_batch), 1 << 53),
    )
    return AdmissionGate(
        shape,
        collecting.max_bytes or shape.size_bytes,
        section.max_update_norm,
        section.clip_update_norm,
        collecting.state_epoch,
        collecting.history.limit(section, model_norm),
        {vector: limit for vector, limit in others.items() if vector != BUFFERS},
        {
            payload.payload: FARTHEST * (1.0 + model_norm)
            for payload in shape.payloads
            if (section.max_relative_norm if payload.payload == DELTA else section.max_relative_payload)
        },
        ordered,
        buffers,
        lambda steps: engine.decoding(collecting.snapshot.round + 1, exchange, client, steps),
    )
