"""What the training for an assignment needs, its result and that of an evaluation, and the errors that end them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from algorithms.base import ClientUpdate, Tensors
from algorithms.client import LocalData, Work
from algorithms.outside_code import described, is_interrupt, own_traceback, place_of
from algorithms.parameters import AlgorithmError
from algorithms.reference import KnownPart, reference_of
from fl_client.errors import Raised, WorkFailed, beyond_limits, unsupported
from fl_client.storage.client_state_store import NextState
from fl_client.storage.pending_updates import Update
from fl_client.training import client_states, payloads
from fl_client.training.rounded import as_summed, rounded_update
from fl_tasks.metrics import AVERAGED_PREFIX
from fl_tasks.summed_metrics import PlainSum, of_averaged_model
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from protos.wire import filled


class Interrupted(Exception):
    """Raised by an `on_step` to end the training: its result is not needed."""


@contextmanager
def task_failures() -> Iterator[None]:
    """Turn any error of the task's code, torch or the device into a failure that is reported to the coordinator."""
    try:
        yield
    except (Interrupted, WorkFailed):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise beyond_limits(f"out of memory: {error}") from error
    except AlgorithmError as error:
        raise unsupported(f"algorithm: {error}") from error
    except BaseException as error:  # a fault in the task's own code, of any type
        if is_interrupt(error):
            raise
        raise failure_of(error) from error


def failure_of(error: BaseException) -> WorkFailed:
    """The failure of an exception that the task's own code raised: with its type, message, file and line."""
    text = described(error)
    # torch has no type for this error. The text selects a hint and decides nothing.
    hint = _BATCH_OF_ONE if "more than 1 value per channel" in text else ""
    return WorkFailed(pb.FAILURE_REASON_TASK_ERROR, f"{text}{hint}", _raised(error))


def _raised(error: BaseException) -> Raised:
    """An error of ours stands for the one of the task's code that caused it."""
    while f"{type(error).__module__}.".startswith(_OURS) and error.__cause__ is not None:
        error = error.__cause__
    return Raised(type(error).__name__, place_of(error), own_traceback(error))


_OURS = ("algorithms.", "fl_client.", "fl_extensions.", "fl_tasks.")


_BATCH_OF_ONE = (
    ": batch norm needs two examples in every batch, and here one has a single example. Choose a batch_size that leaves"
    " no remainder of one on any device, or GroupNorm in place of BatchNorm"
)


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
    position: client_states.ReadPosition | None = None
    """The client's place in its examples, which are read on. None: each round has a new order."""


def result_of(  # noqa: PLR0913, PLR0917 - what a header has
    assignment: training_pb2.Assignment, ready: PreparedWork, computed: ClientUpdate, examples: int, seconds: float
) -> TrainingResult:
    """The result of computed payloads. Raises WorkFailed for a value that is not finite.

    examples: n_i; seconds: of training.
    """
    payloads.check_finite(computed, ready.buffers)
    if assignment.HasField("secure_aggregation"):
        update, summed = rounded_update(assignment, computed, examples, keeps=_keeps_state(ready))
        return TrainingResult(update, next_state_of(ready, summed))
    known = _known_part(assignment, ready.work, computed.steps)
    sparse = "delta" in computed.payloads and payloads.encoding_of(assignment).sparse
    sent = client_states.with_unsent(computed, ready.unsent)
    update = payloads.pack_update(assignment, sent, examples, seconds, known)
    keeps = sparse or _keeps_state(ready)
    counted = payloads.as_counted(assignment, sent, update, known) if keeps else computed
    counted = as_summed(assignment, counted, examples)
    next_state = next_state_of(ready, counted)
    return TrainingResult(update, client_states.with_next_unsent(next_state, sent, counted) if sparse else next_state)


def next_state_of(ready: PreparedWork, counted: ClientUpdate) -> NextState | None:
    """The client state to keep if these payloads count, without error feedback; None if there is none.

    counted: with the values that the coordinator adds.
    """
    algorithm, context = ready.work.algorithm, ready.work.context
    next_state = NextState.of(algorithm, context, counted) if _keeps_state(ready) else None
    next_state = client_states.with_next_personal(next_state, counted.personal)
    if ready.position is None or not algorithm.exchanges[ready.work.exchange].trains:
        return next_state
    return ready.position.after(next_state, counted.steps)


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


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a device measured on its held-out examples."""

    examples: int
    metrics: dict[str, float]
    """Means over the examples, by name; with this device's personal values, if the run has personal parameters."""
    without_personal: dict[str, float]
    """The metrics of the same model with the initial values of its personal parameters; empty if it has none."""
    sums: list[PlainSum] = field(default_factory=list)
    """The sums of the metrics that are no means."""
    sums_without_personal: list[PlainSum] = field(default_factory=list)

    def with_averaged(self, averaged: Evaluation) -> Evaluation:
        """This, with what was measured with the averaged model under names of their own."""
        return Evaluation(
            self.examples,
            {**self.metrics, **_of_averaged_model(averaged.metrics)},
            {**self.without_personal, **_of_averaged_model(averaged.without_personal)},
            [*self.sums, *of_averaged_model(averaged.sums)],
            [*self.sums_without_personal, *of_averaged_model(averaged.sums_without_personal)],
        )

    def report(self) -> pb.ReportEvaluationRequest:
        """What is sent of it."""
        sums, without = (map(_sum_message, of) for of in (self.sums, self.sums_without_personal))
        others = {"num_examples": self.examples, "sums": sums, "sums_without_personal": without}
        return filled(pb.ReportEvaluationRequest, self, **others)

    def sent(self) -> str:
        """What leaves the device, in words: accuracy, f1, sums of f1 (3 numbers)."""
        counts: Counter[str] = Counter()
        for metric, _, _, values in self.sums:
            counts[metric] += len(values)
        return ", ".join(
            [*sorted(self.metrics), *(f"sums of {name} ({count} numbers)" for name, count in counts.items())]
        )


def _sum_message(given: PlainSum) -> pb.MetricSum:
    metric, name, shape, values = given
    return pb.MetricSum(metric=metric, name=name, shape=shape, values=values)


def _of_averaged_model(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{AVERAGED_PREFIX}{name}": value for name, value in metrics.items()}
