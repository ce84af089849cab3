"""Watches a run across lost connections: a coordinator that restarts continues its runs, and so does the watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from fl_ops.errors import Unreachable
from fl_ops.render.runs.progress import Lost, exit_code
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
