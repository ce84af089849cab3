"""The workers engine: several clients at once, in forked processes of one torch thread each.

A worker has the data sets from the fork, without a copy, and maps the bundles of an exchange from files. Updates and
client states are files, too: for a client an assignment is sent, and a header comes back. A client's update does not
depend on the process that computes it, so the model has the same bits for any number of workers.
"""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from fl_ops.errors import Refused
from fl_ops.simulate.engines.client_work import ClientWork
from fl_ops.simulate.engines.engine import (
    Bundles,
    EngineContext,
    Evaluated,
    ExamplesOf,
    Failed,
    Part,
    PartResult,
    Trained,
)
from fl_ops.simulate.engines.worker import (
    Answer,
    Begin,
    Evaluate,
    Raised,
    Request,
    Result,
    Share,
    Shared,
    StoredBundle,
    Train,
    serve,
)
from fl_server.aggregation.task_model import packed
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment

_AHEAD = 2
"""Requests that a worker has at most: it begins the next one while this process reads the result of the last one."""
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(eq=False)
class _Worker:
    process: ForkProcess
    connection: Connection
    clients: deque[str] = field(default_factory=deque)
    """Clients whose work was sent and has no result yet, the earliest first."""


class WorkersEngine:
    """See `LocalEngine`. The clients with the most examples begin first."""

    def __init__(self, context: EngineContext, workers: int) -> None:
        """Start the processes. Raises TaskError if the task's model cannot be made."""
        self._context = context
        self._folder = TemporaryDirectory(prefix="fl-bundles-", dir=context.folder)
        self._exchange = 0
        self._workers: list[_Worker] = []
        work = ClientWork(context)
        for number in range(workers):
            self._workers.append(_start(f"worker-{number}", work, [each.connection for each in self._workers]))

    @property
    def report(self) -> str:
        """See `LocalEngine.report`."""
        return ""

    def begin(self, bundles: Bundles) -> None:
        """See `LocalEngine.begin`. No work is in progress then, so the files of the last bundles are not needed."""
        for path in Path(self._folder.name).iterdir():
            path.unlink()
        self._exchange += 1
        stored = []
        for number, (key, bundle) in enumerate(bundles.items()):
            path = Path(self._folder.name) / f"{self._exchange}-{number}"
            path.write_bytes(packed(bundle.tensors, bundle.layout))
            stored.append(StoredBundle(key, bundle.layout, path))
        for worker in self._workers:
            _send(worker, Begin(stored))

    def train(self, common: Assignment, clients: Sequence[str], seeds: Sequence[int]) -> Iterator[Trained | Failed]:
        """See `LocalEngine.train`."""
        text = common.SerializeToString()
        for result in self._results([Train(client, text, seed) for client, seed in zip(clients, seeds, strict=True)]):
            if isinstance(result, Trained | Failed):
                yield result

    def evaluate(
        self, common: EvaluationAssignment, clients: Sequence[str], on: ExamplesOf = "held_out"
    ) -> Iterator[Evaluated | Failed]:
        """See `LocalEngine.evaluate`."""
        text = common.SerializeToString()
        for result in self._results([Evaluate(client, text, on) for client in clients]):
            if isinstance(result, Evaluated | Failed):
                yield result

    def share(self, parts: Sequence[Part]) -> list[PartResult] | None:
        """See `LocalEngine.share`."""
        if any(worker.clients for worker in self._workers) or len(parts) > len(self._workers):
            return None
        busy = self._workers[: len(parts)]
        for worker, part in zip(busy, parts, strict=True):
            request = Share(part)
            worker.clients.append(request.client)
            _send(worker, request)
        results = [_receive(worker) for worker in busy]
        return [result.result for result in results if isinstance(result, Shared)]

    def close(self) -> None:
        """See `LocalEngine.close`."""
        for worker in self._workers:
            worker.process.kill()  # it has nothing to write at its end
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers.clear()
        self._folder.cleanup()

    def _results(self, requests: Sequence[Train | Evaluate]) -> Iterator[Answer]:
        """The result of each request, in the order in which they come."""
        waiting: deque[Train | Evaluate] = deque(
            sorted(requests, key=lambda request: self._context.size_of(request.client), reverse=True)
        )
        try:
            for worker in self._workers:
                self._send_next(worker, waiting)
            while busy := {worker.connection: worker for worker in self._workers if worker.clients}:
                for connection in wait(list(busy)):
                    worker = busy[connection]  # type: ignore[index]  # wait() returns what it was given
                    result = _receive(worker)
                    self._send_next(worker, waiting)
                    yield result
        except GeneratorExit:
            # The files of work in progress would appear later, perhaps those of a client that works again then.
            for worker in self._workers:
                while worker.clients:
                    _receive(worker)
            raise

    def _send_next(self, worker: _Worker, waiting: deque[Train | Evaluate]) -> None:
        """Send a worker what it can have now. Near the end it gets one client at a time, so that no other waits."""
        while waiting and len(worker.clients) < (_AHEAD if len(waiting) > len(self._workers) else 1):
            request = waiting.popleft()
            worker.clients.append(request.client)
            _send(worker, request)


def _start(name: str, work: ClientWork, others: Sequence[Connection]) -> _Worker:
    """Fork a worker. others: our ends of the pipes to other workers, which it inherits and closes."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(work, theirs, [ours, *others]), name=name, daemon=True)
    # A signal between the fork and the worker's first line would run this process's handlers in the worker.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of threads at a fork. A worker takes no lock of another thread: as torch's DataLoader.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return _Worker(process, ours)


def _send(worker: _Worker, message: Begin | Request) -> None:
    try:
        worker.connection.send(message)
    except OSError as error:
        raise _ended(worker) from error


def _receive(worker: _Worker) -> Answer:
    """The next result of a worker. Raises the error that its work raised, and Refused if the worker ended."""
    try:
        result: Result = worker.connection.recv()
    except (EOFError, OSError) as error:
        raise _ended(worker) from error
    worker.clients.popleft()
    if isinstance(result, Raised):
        raise result.error()
    return result


def _ended(worker: _Worker) -> Refused:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    client = worker.clients[0] if worker.clients else "no client"
    return Refused(
        f"the process that did the work of {client} ended unexpectedly ({how}): if the machine ran out of memory, use "
        "fewer --workers"
    )
