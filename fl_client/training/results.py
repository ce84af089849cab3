"""What the training for an assignment needs, and its result: the update, and the client state to keep if it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from algorithms.base import ClientUpdate, Tensors
from algorithms.client import LocalData, Work
from algorithms.reference import KnownPart, reference_of
from fl_client.storage.client_state_store import NextState
from fl_client.storage.pending_updates import Update
from fl_client.training import error_feedback, packing, payloads
from fl_client.training import personal as own
from protos.fl.v1 import training_pb2


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """An update, and the client state to keep if it counts."""

    update: Update
    next_state: NextState | None
    """None where the method has no client state in this exchange."""


@dataclass(frozen=True, slots=True)
class PreparedWork:
    """Everything that the training for an assignment needs."""

    model: nn.Module
    """It has the values of the assignment's bundles."""
    data: LocalData
    work: Work
    steps: int
    """Number of batches: of a full gradient, then of steps."""
    buffers: Tensors
    """The model's buffers as received."""
    unsent: Tensors = field(default_factory=dict)
    """e_i of `error_feedback`; empty: zero."""


def result_of(  # noqa: PLR0913, PLR0917 - what a header has
    assignment: training_pb2.Assignment, ready: PreparedWork, computed: ClientUpdate, examples: int, seconds: float
) -> TrainingResult:
    """The result of computed payloads. Raises WorkFailed for a value that is not finite.

    examples: n_i; seconds: of training.
    """
    payloads.check_finite(computed, ready.buffers)
    known = _known_part(assignment, ready.work, computed.steps)
    sparse = "delta" in computed.payloads and packing.encoding_of(assignment).sparse
    sent = error_feedback.with_unsent(computed, ready.unsent)
    update = packing.pack_update(assignment, sent, examples, seconds, known)
    keeps = sparse or _keeps_state(ready)
    counted = packing.as_counted(assignment, sent, update, known) if keeps else computed
    next_state = next_state_of(ready, counted)
    return TrainingResult(update, error_feedback.added(next_state, sent, counted) if sparse else next_state)


def next_state_of(ready: PreparedWork, counted: ClientUpdate) -> NextState | None:
    """The client state to keep if these payloads count, without error feedback; None if there is none.

    counted: with the values that the coordinator adds.
    """
    algorithm, context = ready.work.algorithm, ready.work.context
    next_state = NextState.of(algorithm, context, counted) if _keeps_state(ready) else None
    return own.added(next_state, counted.personal)


def _keeps_state(ready: PreparedWork) -> bool:
    """Whether the method has a client state after this exchange."""
    algorithm = ready.work.algorithm
    return algorithm.keeps_client_state and algorithm.exchanges[ready.work.exchange].trains


def _known_part(assignment: training_pb2.Assignment, work: Work, steps: int) -> KnownPart | None:
    """What the coordinator adds to a delta of so many steps. None: the whole delta is sent."""
    if not assignment.without_direction:
        return None
    reference = reference_of(work.algorithm, work.exchange, work.context.direction)
    return None if reference is None else KnownPart(reference, reference.scale(work.settings, steps))
