"""The traceback of an error in code that is not ours, for the author of a task."""

from __future__ import annotations

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
