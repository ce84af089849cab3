"""One run after the other on the same daemons, each watched to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread

from rich.console import Console

from fl_ops.admin_client import AdminClient
from fl_ops.demo.results import Result, Round
from fl_ops.demo.settings import DemoSettings, Method
from fl_ops.errors import Exit, OpsError, Refused
from fl_ops.follow import follow
from fl_ops.run_file import parse_run
from protos.fl.v1 import admin_pb2

_LOOK_SECONDS = 0.2
_GONE_SECONDS = 2.0
"""A stream can break before the process that broke it is seen to have ended."""

Check = Callable[[float], None]
"""Raises when a child is gone, or goes within so many seconds."""


def train(client: AdminClient, settings: DemoSettings, check: Check, console: Console) -> list[Result]:
    """Every algorithm of the settings, in their order. Raises an `OpsError` when one does not come to its end."""
    watch = _Watch(client, check, console)
    return [_train(client, settings, settings.method(name), watch) for name in settings.algorithms]


def _train(client: AdminClient, settings: DemoSettings, method: Method, watch: _Watch) -> Result:
    import algorithms  # torch is here already, but who only reads --help does not wait for it

    began = time.monotonic()
    run = client.create_run(parse_run(settings.run(method)))
    watch.to_end(run.run_id)
    seconds = time.monotonic() - began
    answer = client.get_run(run.run_id)
    return Result(
        method=method,
        parameters=dict(algorithms.build(method.algorithm, **method.parameters).parameters),
        rounds=tuple(Round.of(summary) for summary in answer.rounds),
        seconds=seconds,
    )


class _Watch:
    """Follows runs and looks after the children meanwhile."""

    def __init__(self, client: AdminClient, check: Check, console: Console) -> None:
        self._client = client
        self._check = check
        self._console = console

    def to_end(self, run_id: str) -> None:
        """Shows a run until it is completed."""
        code = follow(self._events(run_id), False, self._console)
        if code is not Exit.OK:
            run = self._client.get_run(run_id).run
            raise Refused(f"run {run_id} did not complete: {run.reason or code.name.lower().replace('_', ' ')}")

    def _events(self, run_id: str) -> Iterator[admin_pb2.WatchRunResponse]:
        arrived: SimpleQueue[admin_pb2.WatchRunResponse | OpsError | None] = SimpleQueue()
        Thread(target=self._read, args=(run_id, arrived), name="watch", daemon=True).start()
        while True:
            self._check(0.0)
            try:
                seen = arrived.get(timeout=_LOOK_SECONDS)
            except Empty:
                continue
            if seen is None:
                return
            if isinstance(seen, OpsError):
                self._check(_GONE_SECONDS)
                raise seen
            yield seen

    def _read(self, run_id: str, arrived: SimpleQueue[admin_pb2.WatchRunResponse | OpsError | None]) -> None:
        """On a thread: nothing comes from the stream of a run whose daemon is gone, and that must be noticed."""
        try:
            for seen in self._client.watch_run(run_id):
                arrived.put(seen)
            arrived.put(None)
        except OpsError as error:
            arrived.put(error)
