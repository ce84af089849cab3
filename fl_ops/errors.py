"""All errors of the command `fl`, as one tree, with the exit code of each.

OpsError
├── Refused       the coordinator refused, or the work failed
├── UsageError    the command line or a configuration is wrong
├── Unreachable   no coordinator answers
├── NotAllowed    the certificate or its role does not allow the call
└── NotFound      no such run, client or round
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command. They do not change."""

    OK = 0
    REFUSED = 1
    MISUSED = 2
    UNREACHABLE = 3
    NOT_ALLOWED = 4
    NOT_FOUND = 5
    RUN_STOPPED = 6
    RUN_FAILED = 7
    WORK_LEFT = 8
    INTERRUPTED = 130


class OpsError(Exception):
    """Ends a command. The text states what was expected, what was found and what to do."""

    code = Exit.REFUSED
    trace = ""
    """The traceback of the code of a task's author, where that code caused the error."""


class Refused(OpsError):
    """The coordinator refused the call, or its answer was not usable."""


class UsageError(OpsError):
    """The command line, a configuration file or a value in it is wrong."""

    code = Exit.MISUSED


class Unreachable(OpsError):
    """No coordinator answers at the address, or the connection was lost."""

    code = Exit.UNREACHABLE


class NotAllowed(OpsError):
    """The coordinator does not allow the caller to do this."""

    code = Exit.NOT_ALLOWED


class NotFound(OpsError):
    """There is no run, client or round of that name."""

    code = Exit.NOT_FOUND


_NAMES = ("fl_ops.", "fl_client.", "fl_server.", "algorithms.", "fl_extensions.", "fl_tasks.")
_RAN_A_TASK = {"TaskError", "WorkFailed", "AlgorithmError"}
"""Errors that have an exception of a user's code as their cause."""


def traceback_of(error: BaseException) -> str:
    """The traceback of the exception that caused `error`, from the first frame that is not ours.

    Empty if no code of a task's author took part: `error` then states everything, such as a missing file.
    """
    cause: BaseException | None = error
    ours = ""
    while cause is not None and f"{type(cause).__module__}.".startswith(_NAMES):
        cause, ours = cause.__cause__, type(cause).__name__
    if cause is None or ours not in _RAN_A_TASK:
        return ""
    from algorithms.outside_code import own_traceback  # it loads torch, which has been loaded if a task ran

    return own_traceback(cause)
