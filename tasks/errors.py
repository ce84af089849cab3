"""The error of a task, and the guard around code of the task's author."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from algorithms.outside_code import outside_code
from extensions.process_state import process_state_kept


class TaskError(ValueError):
    """A task, its options, its data or its partition is invalid. The message names the remedy."""


def task_code(what: str) -> AbstractContextManager[None]:
    """Run code of the task's author. Whatever it raises becomes a TaskError that names `what` and has it as cause."""
    return outside_code(what, TaskError)


@contextmanager
def task_call(what: str) -> Iterator[None]:
    """The same for a whole call, such as model(), that must also leave the state of the process as it is."""
    with task_code(what), process_state_kept(what, TaskError):
        yield
