"""Tests of the guard around code from outside."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from algorithms.outside_code import described, outside_code


class Own(BaseException):
    """An exception that is no Exception, as somebody's code may have one."""


class Unreadable(Exception):
    """An exception without a message."""

    def __str__(self) -> str:
        raise SystemExit(3)


def fails(raised: BaseException) -> None:
    """The author's code."""
    raise raised


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (SystemExit(5), "SystemExit: 5"),
        (asyncio.CancelledError(), "CancelledError"),
        (Own("gone"), "Own: gone"),
        (GeneratorExit(), "GeneratorExit"),
        (KeyError("age"), "KeyError: 'age'"),
        (Unreadable(), "Unreadable: a message that cannot be read"),
    ],
)
def test_whatever_code_raises_becomes_the_error_with_its_place(raised: BaseException, shown: str) -> None:
    """Exceptions of every type become the guard's error, with type, message, file and line of the author's frame."""
    with pytest.raises(ValueError, match="^the loss raised ") as caught, outside_code("the loss", ValueError):
        fails(raised)
    assert shown in str(caught.value)
    line = fails.__code__.co_firstlineno + 2
    assert str(caught.value).endswith(f"test_outside_code.py, line {line}, in fails)")
    assert caught.value.__cause__ is raised


def test_ctrl_c_passes_in_the_main_thread_alone() -> None:
    """A KeyboardInterrupt ends a command that runs the code in its main thread; in a thread it is the code's own."""
    with pytest.raises(KeyboardInterrupt), outside_code("the loss", ValueError):
        raise KeyboardInterrupt
    caught: list[str] = []

    def in_thread() -> None:
        try:
            with outside_code("the loss", ValueError):
                raise KeyboardInterrupt
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert "raised KeyboardInterrupt" in caught[0]


def test_the_place_is_the_authors_own_frame_not_torch() -> None:
    """An error inside of a library is shown at the line of the author's code that called it."""
    with pytest.raises(RuntimeError) as caught:
        torch.stack([torch.zeros(2), torch.zeros(3)])
    assert "test_outside_code.py" in described(caught.value)


def test_a_long_message_is_cut() -> None:
    """The message of an exception is limited, so that none fills a row of the ledger."""
    assert len(described(ValueError("x" * 10**6))) < 2100
