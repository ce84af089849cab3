"""The error of a task, and the guard around code of the task's author."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from algorithms.outside_code import is_of_the_machine, outside_code
from algorithms.parameters import AlgorithmError
from fl_extensions.process_state import process_state_kept


class TaskError(ValueError):
    """A task, its options, its data or its partition is invalid. The message names the remedy."""


class TaskFault(TaskError):
    """The task's own code raised something that no other machine would change, or ended the process that it ran in."""


class TaskTimedOut(TaskError):
    """The task's code did not end in its time. The machine may have been slow."""


def is_own_fault(error: BaseException) -> bool:
    """Whether the code of a task, method or reducer is to blame, so that another try would end in the same way.

    It is not for what the machine lacks (`is_of_the_machine`), nor for a TaskError or AlgorithmError without a cause,
    which states what another configuration or other options would change.
    """
    causes = _causes(error)
    if any(isinstance(cause, TaskFault) for cause in causes):
        return True
    if any(isinstance(cause, TaskTimedOut) or is_of_the_machine(cause) for cause in causes):
        return False
    guards = [number for number, cause in enumerate(causes) if isinstance(cause, TaskError | AlgorithmError)]
    return bool(guards) and guards[-1] + 1 < len(causes)


def _causes(error: BaseException) -> list[BaseException]:
    """The error, its cause, and so on."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes


def task_code(what: str) -> AbstractContextManager[None]:
    """Run code of the task's author. Whatever it raises becomes a TaskError that names `what` and has it as cause."""
    return outside_code(what, TaskError)


@contextmanager
def task_call(what: str) -> Iterator[None]:
    """The same for a whole call, such as model(), that must also leave the state of the process as it is."""
    with task_code(what), process_state_kept(what, TaskError):
        yield
