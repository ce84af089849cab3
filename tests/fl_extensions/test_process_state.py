"""Tests of the state that code from outside must leave as it is."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fl_extensions.process_state import process_state_kept


def state() -> list[object]:
    """What must stay."""
    handler = signal.getsignal(signal.SIGUSR2)
    return [
        Path.cwd(), list(sys.argv), handler, torch.get_default_dtype(), torch.get_default_device(),
        torch.get_num_threads(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda: os.chdir("/"), "the working directory"),
        (lambda: sys.argv.append("--lr"), "sys.argv"),
        (lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN), "signal handlers"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "torch's thread count"),
    ],
)
def test_a_change_of_the_process_is_undone_with_a_warning(change: Callable[[], object], what: str) -> None:
    """Code that changes the working directory, arguments, signal handlers or threads is warned of, and undone."""
    before = state()
    with pytest.warns(UserWarning, match=f"importing mine changed {what} of the process"):  # noqa: SIM117
        with process_state_kept("importing mine", ValueError):
            change()
    assert state() == before


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype"),
        (lambda: torch.set_default_device("meta"), "torch's default device"),
    ],
)
def test_another_default_dtype_or_device_is_an_error(change: Callable[[], object], what: str) -> None:
    """Code that changes the default dtype or device of the process is refused, and the change is undone."""
    before = state()
    with pytest.raises(ValueError, match=f"model\\(\\) changed {what} of the whole process"):  # noqa: SIM117
        with process_state_kept("model()", ValueError):
            change()
    assert state() == before
    assert not torch.empty(1).is_meta


def test_the_programs_arguments_are_hidden_also_from_overlapping_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """During calls sys.argv has the program's name alone; the arguments are back after the last of them."""
    monkeypatch.setattr(sys, "argv", ["fl-server", "--config", "server.toml"])
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with process_state_kept("the other", ValueError):
            entered.set()
            leave.wait(120)

    thread = threading.Thread(target=other)
    with process_state_kept("one", ValueError):
        thread.start()
        assert entered.wait(120)
        assert sys.argv == ["fl-server"]
    assert sys.argv == ["fl-server"]
    leave.set()
    thread.join()
    assert sys.argv == ["fl-server", "--config", "server.toml"]


def test_an_exception_of_the_call_goes_on_and_the_state_is_restored() -> None:
    """A call that fails leaves the state of the process as it was."""
    before = state()

    def fails() -> None:
        torch.set_default_dtype(torch.float64)
        raise KeyError

    with pytest.raises(KeyError), process_state_kept("model()", ValueError):
        fails()
    assert state() == before


def test_a_call_of_another_thread_is_not_blamed_for_a_signal_handler() -> None:
    """The main thread sets a handler during the call, which stays, and nobody is warned."""
    entered, changed = threading.Event(), threading.Event()

    def call() -> None:
        with process_state_kept("it", ValueError):
            entered.set()
            assert changed.wait(120)

    before = signal.getsignal(signal.SIGUSR2)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
        assert entered.wait(120)
        try:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            changed.set()
            done.result()  # a warning would be an error
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGUSR2, before)
