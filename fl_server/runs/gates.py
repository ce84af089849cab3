"""The gate of an exchange, from a run's settings and its committed rounds: a coordinator's and a simulation's."""

from __future__ import annotations

from dataclasses import dataclass

from fl_server.admission import Gate
from fl_server.engine import Engine, Snapshot
from fl_server.norms import BUFFERS, NO_LIMIT, NormHistory
from fl_server.runs.buffers import BufferRules, most_counted
from fl_server.runs.ordered import Ordered


@dataclass(frozen=True, slots=True)
class Collecting:
    """The exchange under way."""

    snapshot: Snapshot
    """That its clients were sent."""
    exchange: int
    state_epoch: int
    history: NormHistory


def gate_of(engine: Engine, collecting: Collecting, registered: int, max_bytes: int = 0) -> Gate:
    """What the update of a client that registered so many examples must be. max_bytes: 0 for as many as it has."""
    section, local, exchange = engine.config.round, engine.config.local, collecting.exchange
    shape = engine.shape(exchange)
    ordered = Ordered(registered, local, engine.algorithm.exchanges[exchange].trains)
    others = collecting.history.others(section)
    steps = ordered.steps(max(1, registered))
    buffers = BufferRules(
        collecting.snapshot.buffers,
        bounded=bool(section.max_relative_payload),
        limit=others.get(BUFFERS, NO_LIMIT),
        most=min(most_counted(steps, registered, local.batch_size), 1 << 53),
    )
    return Gate(
        shape,
        max_bytes or shape.size_bytes,
        section.max_update_norm,
        section.clip_update_norm,
        collecting.state_epoch,
        collecting.history.limit(section),
        {vector: limit for vector, limit in others.items() if vector != BUFFERS},
        ordered,
        buffers,
    )
