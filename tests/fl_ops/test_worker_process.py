"""What a forked worker leaves alone."""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import ClassVar

from fl_ops.worker_process import become_worker


class _Thrown:
    """An object that only a garbage collection destroys."""

    ended_in: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.ended_in.append(os.getpid())


def _work(answer: Connection) -> None:
    become_worker()
    gc.collect()
    answer.send(os.getpid() in _Thrown.ended_in)


def test_a_worker_destroys_no_object_of_its_parent() -> None:
    """A channel of gRPC, for one, must not be closed in a forked process."""
    gc.disable()
    try:
        _Thrown()
        mine, other = multiprocessing.Pipe()
        worker = multiprocessing.get_context("fork").Process(target=_work, args=(other,))
        worker.start()
        assert mine.poll(60)
        assert mine.recv() is False
        worker.join()
    finally:
        gc.enable()
    gc.collect()
    assert _Thrown.ended_in == [os.getpid()]
