"""Code from outside: tasks, methods, reducers and optimizers that are not of this project.

Such code may raise anything, also what would end the process or its event loop: SystemExit, KeyboardInterrupt,
asyncio.CancelledError. All of it becomes an error of the one run or client, with type, message, file and line.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary, TracebackException, extract_stack, extract_tb

_PACKAGES = __file__.removesuffix("algorithms/outside_code.py")
_OURS = tuple(
    f"{_PACKAGES}{name}/"
    for name in ("algorithms", "fl_client", "fl_common", "fl_extensions", "fl_ops", "fl_server", "fl_tasks", "protos")
)
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = ("/site-packages/", "/dist-packages/")

_MOST = 2000
"""Characters of an exception's own message."""


@contextmanager
def outside_code(what: str, error: type[ValueError]) -> Iterator[None]:
    """Run code from outside. Whatever it raises becomes an `error` that names `what` and has it as cause.

    An `error` itself passes. So does KeyboardInterrupt in the main thread, where Python raises it for Ctrl-C.
    """
    try:
        yield
    except error:
        raise
    except BaseException as raised:
        if is_interrupt(raised):
            raise
        raise error(f"{what} raised {described(raised)}") from raised


def is_interrupt(raised: BaseException) -> bool:
    """Whether it is Ctrl-C, which no guard may catch. In other threads a KeyboardInterrupt is the author's own."""
    return isinstance(raised, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def is_of_the_machine(raised: BaseException) -> bool:
    """Whether an error is about what a machine has: files, modules, the network, memory."""
    return isinstance(raised, OSError | ImportError | MemoryError) or "allocate memory" in str(raised)


def described(raised: BaseException) -> str:
    """Type, message, and file and line in the code from outside: "KeyError: 'age' (mine.py, line 3, in loss)"."""
    message = _message(raised)
    place = place_of(raised)
    return f"{type(raised).__name__}{': ' if message else ''}{message}{f' ({place})' if place else ''}"


def _message(raised: BaseException) -> str:
    try:
        message = str(raised)
    except BaseException as error:  # noqa: BLE001 - `__str__` is code from outside too
        return f"a message that cannot be read ({type(error).__name__})"
    return message if len(message) <= _MOST else f"{message[:_MOST]}..."


def place_of(raised: BaseException) -> str:
    """File, line and function of the innermost frame that is the author's; empty if there is none.

    As in "mine.py, line 3, in loss".
    """
    return place_of_frames(extract_tb(raised.__traceback__))


def place_of_thread(ident: int) -> str:
    """The same of what a thread does now."""
    frame = sys._current_frames().get(ident)  # noqa: SLF001 - the documented way to see another thread
    return "" if frame is None else place_of_frames(extract_stack(frame))


def place_of_frames(stack: StackSummary) -> str:
    """The same of frames, the innermost last."""
    frames = [frame for frame in stack if is_foreign(frame.filename)]
    if not frames:
        return ""
    own = [frame for frame in frames if not any(folder in frame.filename for folder in _INSTALLED)]
    frame = (own or frames)[-1]
    where = "" if frame.name.startswith("<") else f", in {frame.name}"
    return f"{_shown(frame.filename)}, line {frame.lineno}{where}"


def own_traceback(raised: BaseException) -> str:
    """The traceback from the first frame that is the author's; empty if there is none."""
    trace = TracebackException.from_exception(raised)
    foreign = [index for index, frame in enumerate(trace.stack) if is_foreign(frame.filename)]
    if not foreign and not isinstance(raised, SyntaxError):
        return ""
    trace.stack = StackSummary.from_list(trace.stack[foreign[0] :] if foreign else [])
    return "".join(trace.format(chain=raised.__cause__ is not None or not raised.__suppress_context__)).rstrip("\n")


def is_foreign(file: str) -> bool:
    """Whether a file of a traceback is neither of this project nor of Python's standard library."""
    installed = any(folder in file for folder in _INSTALLED)
    return not file.startswith(("<frozen", *_OURS)) and (installed or not file.startswith(_STANDARD))


def _shown(file: str) -> str:
    """The path below the folder that it was imported from: that is how its author knows it."""
    folders = [f"{entry}/" for entry in sys.path if entry]
    return file.removeprefix(max((folder for folder in folders if file.startswith(folder)), key=len, default=""))
