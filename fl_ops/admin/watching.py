"""Watches a run across lost connections, and a whole coordinator: a new state for every change."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import RenderableType

from fl_ops.admin.client import AdminClient
from fl_ops.errors import NotFound, OpsError, Unreachable
from fl_ops.render.rounds import MOST_NAMED
from fl_ops.render.tables import client_details, run_details
from fl_ops.render.top import POINTS, Federation, Selection
from fl_ops.render.watching import Lost, RunProgress, exit_code
from protos.fl.v1 import admin_pb2

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0


def watch(
    client: AdminClient, run_id: str, wait: Callable[[float], None] = time.sleep, *, connected: bool = False
) -> Iterator[admin_pb2.WatchRunResponse | Lost]:
    """Events of a run until it ends, with one `Lost` for each time without a connection.

    After it come the rounds that were missed, as "committed_before", then a snapshot. There is no limit: the operator
    ends the wait.

    Args:
        client: of the coordinator. Its stream begins with a snapshot of the run.
        run_id: the run.
        wait: waits for so many seconds before the stream is opened again.
        connected: the coordinator has answered another call already, so its absence is waited for.

    Raises:
        Unreachable: there is no coordinator at the start.
        OpsError: the coordinator refuses the call.
    """
    attempts, next_round = 0, None
    while True:
        ended, why = False, "the coordinator closed the connection"
        try:
            for event in client.runs.watch_run(run_id, next_round):
                connected, attempts = True, 0
                if event.event in ("committed", "committed_before"):
                    next_round = max(next_round or 0, event.round.round + 1)
                elif next_round is None:
                    next_round = event.run.rounds_done
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


def _cohort(client: AdminClient, run_id: str, limit: int) -> admin_pb2.ListCohortResponse:
    """The first clients of the round under way, at most 1,000, and counts of all."""
    return client.call(admin_pb2.ListCohortRequest(run_id=run_id, page_size=limit), admin_pb2.ListCohortResponse)


EVERY_S = 2.0
"""Seconds between two readings."""
_END_S = 1.0
"""A reading under way is waited for so long, before the caller closes the connection."""


@contextmanager
def cohort_read(client: AdminClient, run_id: str, progress: RunProgress) -> Iterator[None]:
    """Keep `progress.cohort` up to date while the run collects, in a thread, for as long as the block lasts."""
    ended = threading.Event()

    def read_on() -> None:
        while not ended.is_set():
            if progress.run.phase == "collecting":
                try:
                    progress.cohort = _cohort(client, run_id, MOST_NAMED)
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


_RUNS, _CLIENTS, _WATCHED = 100, 1_000, 10
"""The newest runs, the first clients, and the runs whose events are watched."""
_ROUNDS, _COHORT = 10, 100
"""The most newest rounds of the chosen run, and the most clients of its round under way."""
_SHORTEST_S, _IDLE_S = 0.25, 10.0
_OPEN_RUN_S = 2.0
"""A run whose details are open is read again after so long: no event reports the transfers of its clients."""
_ENDED = {admin_pb2.RUN_STATE_COMPLETED, admin_pb2.RUN_STATE_STOPPED, admin_pb2.RUN_STATE_FAILED,
          admin_pb2.RUN_STATE_UNSPECIFIED}  # fmt: skip


def read(client: AdminClient, server: str, chosen: Selection) -> Federation:
    """The coordinator's state now. Raises OpsError."""
    request = admin_pb2.GetOverviewRequest(page_size=_RUNS, points=POINTS)
    overview = client.call(request, admin_pb2.GetOverviewResponse)
    going = [run.run_id for run in overview.runs if run.state not in _ENDED][:_WATCHED]
    active = {run_id: status for run_id in going if (status := _run(client, run_id)) is not None}
    try:
        details = _details(client, chosen) if chosen.open else None
    except NotFound:
        details, chosen = None, Selection()
    clients = client.clients.list_clients(limit=_CLIENTS, order=admin_pb2.CLIENT_ORDER_ATTENTION)
    return Federation(server, overview, clients, active, details, chosen.name, time.monotonic())


def _details(client: AdminClient, chosen: Selection) -> RenderableType:
    """A client; or a run, the clients of its round if it collects, and its newest rounds."""
    if chosen.list == "clients":
        request = admin_pb2.GetClientRequest(client_id=chosen.name)
        return client_details(client.call(request, admin_pb2.GetClientResponse))
    run = client.runs.get_run(chosen.name, _ROUNDS)
    return run_details(run, cohort=_cohort(client, chosen.name, _COHORT) if run.run.phase == "collecting" else None)


def _run(client: AdminClient, run_id: str) -> admin_pb2.RunStatus | None:
    try:
        return client.runs.get_run(run_id, 0).run
    except NotFound:  # deleted since
        return None


class Feed:
    """Reads the coordinator again after each change, in threads of its own, until `close`."""

    def __init__(self, client: AdminClient, first: Federation) -> None:
        self._client = client
        self.federation, self.lost = first, ""
        """The newest state; and why there is no connection, empty if there is one."""
        self.news, self._wake = os.pipe()
        """A pipe that can be read after each change of these two."""
        self._changed, self._closed = threading.Event(), threading.Event()
        self._chosen = Selection()
        self._watched: set[str] = set()

    def start(self) -> None:
        """Start the threads that read the coordinator."""
        for work in (self._read_on, self._watch_history):
            threading.Thread(target=work, daemon=True).start()

    def choose(self, chosen: Selection) -> None:
        """The details that are wanted from now on."""
        if chosen != self._chosen:
            self._chosen = chosen
            if chosen.open:
                self._changed.set()

    def close(self) -> None:
        """Stop. The threads end with the connection."""
        self._closed.set()
        self._changed.set()

    def _read_on(self) -> None:
        while not self._closed.is_set():
            self._changed.clear()
            try:
                federation = read(self._client, self.federation.server, self._chosen)
            except OpsError as error:
                self._tell(self.federation, str(error))
            else:
                self._tell(federation)
                for run_id in federation.active.keys() - self._watched:
                    self._watched.add(run_id)
                    threading.Thread(target=self._watch_run, args=(run_id,), daemon=True).start()
            self._closed.wait(_SHORTEST_S)  # many changes at once are one
            self._changed.wait(_OPEN_RUN_S if self._chosen.open and self._chosen.list == "runs" else _IDLE_S)

    def _tell(self, federation: Federation, lost: str = "") -> None:
        if not self._closed.is_set():
            self.federation, self.lost = federation, lost and f"no connection: {lost}"
            os.write(self._wake, b".")

    def _watch_history(self) -> None:
        """Note a change for each entry of the history."""
        seconds = _FIRST_WAIT_S
        while not self._closed.is_set():
            try:
                seconds = self._follow(self._client.history.watch_history()) or seconds
            except OpsError as error:
                self._tell(self.federation, str(error))
            self._closed.wait(seconds)
            self._changed.set()
            seconds = min(2 * seconds, _LONGEST_WAIT_S)

    def _follow(self, events: Iterator[object]) -> float:
        """Note a change for each event until the stream ends. Returns the next wait."""
        for _ in events:
            self._changed.set()
        return _FIRST_WAIT_S

    def _watch_run(self, run_id: str) -> None:
        """The run's own events: updates and phases, which the history does not have."""
        with suppress(OpsError):  # the stream of the history reports it
            self._follow(self._client.runs.watch_run(run_id))
        self._watched.discard(run_id)
        self._changed.set()
