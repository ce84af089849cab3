"""Errors of training: what ends it, and what is reported to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from algorithms.outside_code import described, is_interrupt, own_traceback, place_of
from algorithms.parameters import AlgorithmError
from fl_client.errors import Raised, WorkFailed
from protos.fl.v1 import coordinator_pb2 as pb


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
        raise WorkFailed(pb.FAILURE_REASON_RESOURCES, f"out of memory: {error}") from error
    except AlgorithmError as error:
        raise WorkFailed(pb.FAILURE_REASON_UNSUPPORTED, f"algorithm: {error}") from error
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
