"""What code from outside must leave as it is in the process that calls it: the state that all of its code shares."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without stubs
import asyncio
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_lock = threading.Lock()


@dataclass(slots=True)
class _Calls:
    """The calls under way, of all threads. The state before the first of them is the one to restore."""

    open: int = 0
    before: dict[str, Any] | None = None


_calls = _Calls()


@contextmanager
def process_state_kept(what: str, error: type[ValueError]) -> Iterator[None]:
    """Restore the state of the process after a call of code from outside.

    A change of the working directory, sys.argv, signal handlers or torch's thread count is undone with a warning.
    Another default dtype or default device raises `error`: later calls would compute otherwise than their author means.
    During the call sys.argv has the program's name alone, so that no code takes the program's arguments for its own.

    An exception of the call goes on as it is. Calls may overlap in several threads.
    """
    mine = {name: read() for name, (read, _) in _THREADS.items()}
    _enter()
    try:
        yield
    except BaseException:
        _restored(mine)
        raise
    changed = _restored(mine)
    if wrong := [name for name in changed if name in _DECISIVE]:
        raise error(
            f"{what} changed {' and '.join(wrong)} of the whole process, which has been undone: give dtype and device"
            " to the layers and tensors themselves"
        )
    if changed:
        warnings.warn(f"{what} changed {' and '.join(changed)} of the process, which has been undone", stacklevel=3)


def _enter() -> None:
    with _lock:
        if not _calls.open:
            _calls.before = {name: read() for name, (read, _) in _SHARED.items()}
        _calls.open += 1
        sys.argv = sys.argv[:1]


def _restored(mine: dict[str, Any]) -> list[str]:
    """Restore what changed. Returns the names."""
    changed = []
    for name, value in mine.items():
        read, restore = _THREADS[name]
        if read() != value:
            changed.append(name)
            restore(value)
    with _lock:
        _calls.open -= 1
        before = _calls.before or {}
        hidden = before[_ARGUMENTS][:1]
        for name, value in before.items():
            read, restore = _SHARED[name]
            if read() != (hidden if name == _ARGUMENTS else value):
                changed.append(name)
                if name != _ARGUMENTS:
                    restore(value)
        sys.argv = before[_ARGUMENTS] if not _calls.open else hidden
    return changed


def _directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - Path.cwd() costs ten times as much
    except OSError:  # it was removed
        return None


def _set_directory(directory: str | None) -> None:
    if directory is not None:
        os.chdir(directory)


def _handlers() -> dict[int, Any]:
    # Only the main thread can change them: what changes during a call of another thread is not that call's.
    if threading.current_thread() is not threading.main_thread():
        return {}
    # signal.getsignal makes an enumeration's member of each number, for several times the time.
    return {number: _signal.getsignal(number) for number in _SIGNALS}


def _set_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_arguments(arguments: list[str]) -> None:
    sys.argv = arguments


_SIGNALS = sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
_ARGUMENTS, _DTYPE, _DEVICE = "sys.argv", "torch's default dtype", "torch's default device"
_DECISIVE = (_DTYPE, _DEVICE)
_SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    _ARGUMENTS: (lambda: sys.argv, _set_arguments),
    "the working directory": (_directory, _set_directory),
    "asyncio's event loop policy": (asyncio.get_event_loop_policy, asyncio.set_event_loop_policy),
    _DTYPE: (torch.get_default_dtype, torch.set_default_dtype),
}
_THREADS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    _DEVICE: (torch.get_default_device, _set_device),
    "torch's thread count": (torch.get_num_threads, torch.set_num_threads),
    "signal handlers": (_handlers, _set_handlers),
}
