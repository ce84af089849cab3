"""Reads the clients of a watched run's round again and again: no event of the run reports their transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fl_ops.errors import OpsError
from fl_ops.render.runs.progress import RunProgress
from protos.fl.v1 import admin_pb2

EVERY_S = 2.0
"""Between two readings."""
_END_S = 1.0
"""A reading under way is waited for so long, before the caller closes the connection."""


@contextmanager
def cohort_read(read: Callable[[], admin_pb2.ListCohortResponse], progress: RunProgress) -> Iterator[None]:
    """Keep `progress.cohort` up to date while the run collects, in a thread, for as long as the block lasts.

    read: the clients of the round; raises OpsError.
    """
    ended = threading.Event()

    def read_on() -> None:
        while not ended.is_set():
            if progress.run.phase == "collecting":
                try:
                    progress.cohort = read()
                except OpsError:
                    progress.cohort = None  # the watch of the run reports a lost connection
            ended.wait(EVERY_S)

    thread = threading.Thread(target=read_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_S)
