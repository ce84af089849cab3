"""Errors of training: what ends it, and what is reported to the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from algorithms.parameters import AlgorithmError
from fl_client.errors import WorkFailed
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
    except Exception as error:  # a fault in the task's own code, of any type
        # torch has no type for this error. The text selects a hint and decides nothing.
        hint = _BATCH_OF_ONE if "more than 1 value per channel" in str(error) else ""
        raise WorkFailed(pb.FAILURE_REASON_TASK_ERROR, f"{type(error).__name__}: {error}{hint}") from error


_BATCH_OF_ONE = (
    ": batch norm needs two examples in every batch, and here one has a single example. Choose a batch_size that leaves"
    " no remainder of one on any device, or GroupNorm in place of BatchNorm"
)
