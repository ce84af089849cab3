"""Watches a run across lost connections, and reads the clients of its round again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fl_ops.errors import OpsError, Unreachable
from fl_ops.render.watching import Lost, RunProgress, exit_code
from protos.fl.v1 import admin_pb2

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0


def watch(
    follow: Callable[[], Iterator[admin_pb2.WatchRunResponse]],
    wait: Callable[[float], None] = time.sleep,
    *,
    connected: bool = False,
) -> Iterator[admin_pb2.WatchRunResponse | Lost]:
    """Events of a run until it ends, with one `Lost` for each time without a connection.

    The first event after it is a snapshot. There is no limit: the operator ends the wait.

    Args:
        follow: opens the stream, which begins with a snapshot of the run.
        wait: waits for so many seconds before it is opened again.
        connected: the coordinator has answered another call already, so its absence is waited for.

    Raises:
        Unreachable: there is no coordinator at the start.
        OpsError: the coordinator refuses the call.
    """
    attempts = 0
    while True:
        ended, why = False, "the coordinator closed the connection"
        try:
            for event in follow():
                connected, attempts = True, 0
                yield event
                # An event just before the end may already have the ended run's status: the one with the reason follows.
                ended = exit_code(event.run) is not None
                if ended and event.event in ("snapshot", "state"):
                    return
            if ended:
                return
        except Unreachable as error:
            if not connected:
                raise
            why = str(error)
        if not attempts:
            yield Lost(why)
        wait(min(_FIRST_WAIT_S * 2**attempts, _LONGEST_WAIT_S))
        attempts = min(attempts + 1, 10)


EVERY_S = 2.0
"""Seconds between two readings."""
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
