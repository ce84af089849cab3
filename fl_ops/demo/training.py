"""Trains one algorithm after the other on the same daemons, and watches each run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from threading import Thread

from rich.console import Console

from fl_ops.admin.client import AdminClient
from fl_ops.demo.processes import Processes
from fl_ops.demo.results import Result
from fl_ops.demo.settings import DemoSettings, Method
from fl_ops.errors import Exit, OpsError, Refused
from fl_ops.render.watching import show_until_end
from fl_web.facts.rounds import rounds_of
from protos.fl.v1 import admin_pb2
from protos.run_file import parse_run

_POLL_SECONDS = 0.2
_END_SECONDS = 2.0
"""A stream can break this long before the process that caused it is reported as ended."""

Events = SimpleQueue[admin_pb2.WatchRunResponse | OpsError | None]
"""Events of a run, then None or the error that ended the stream."""


def train(client: AdminClient, settings: DemoSettings, processes: Processes, console: Console) -> list[Result]:
    """Run every algorithm of the settings, in their order. Raises OpsError if one does not complete."""
    watch = _Watch(client, processes, console)
    return [_train(client, settings, settings.method(name), watch) for name in settings.algorithms]


def _train(client: AdminClient, settings: DemoSettings, method: Method, watch: _Watch) -> Result:
    import algorithms  # imported here: `fl demo --help` must not wait for torch

    began = time.monotonic()
    run = client.runs.create_run(parse_run(settings.run(method))).run
    watch.until_completed(run.run_id)
    seconds = time.monotonic() - began
    response = client.runs.get_run(run.run_id)
    return Result(
        method=method,
        parameters=dict(algorithms.build(method.algorithm, **method.parameters).parameters),
        rounds=tuple(rounds_of(response.rounds)),
        seconds=seconds,
    )


class _Watch:
    """Watches runs and, at the same time, the child processes."""

    def __init__(self, client: AdminClient, processes: Processes, console: Console) -> None:
        self._client, self._processes, self._console = client, processes, console

    def until_completed(self, run_id: str) -> None:
        """Show a run until it is completed. Raises OpsError if it ends otherwise."""
        code = show_until_end(self._events(run_id), False, self._console)
        if code is not Exit.OK:
            run = self._client.runs.get_run(run_id, 0).run
            raise Refused(f"run {run_id} did not complete: {run.reason or code.name.lower().replace('_', ' ')}")

    def _events(self, run_id: str) -> Iterator[admin_pb2.WatchRunResponse]:
        events: Events = SimpleQueue()
        Thread(target=self._read, args=(run_id, events), name="watch", daemon=True).start()
        while True:
            self._processes.check()
            try:
                event = events.get(timeout=_POLL_SECONDS)
            except Empty:
                continue
            if event is None:
                return
            if isinstance(event, OpsError):
                self._processes.check(_END_SECONDS)
                raise event
            yield event

    def _read(self, run_id: str, events: Events) -> None:
        """Read on a thread: the stream is silent when a daemon has ended, and the main thread must notice that."""
        try:
            for event in self._client.runs.watch_run(run_id):
                events.put(event)
            events.put(None)
        except OpsError as error:
            events.put(error)
