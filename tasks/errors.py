"""The error of a task, and the guard around code of the task's author."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TaskError(ValueError):
    """A task, its options, its data or its partition is invalid. The message names the remedy."""


@contextmanager
def task_code(what: str) -> Iterator[None]:
    """Run code of the task's author. Its exceptions become a TaskError that names `what` and has them as cause."""
    try:
        yield
    except TaskError:
        raise
    except Exception as error:  # a fault in the task's own code, of any type
        raise TaskError(f"{what} raised {type(error).__name__}: {error}") from error
