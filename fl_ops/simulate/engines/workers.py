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
from fl_ops.simulate.engines.engine import Bundles, Done, EngineContext, LocalEngine, Order, Part, PartResult
from fl_ops.simulate.engines.worker import Answer, Request, StoredBundles, serve, subject_of
from fl_server.aggregation.task_model import packed
from fl_tasks import TaskError

_AHEAD = 2
"""Requests that a worker has at most: it begins the next one while this process reads the result of the last one."""
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(eq=False)
class _Worker:
    process: ForkProcess
    connection: Connection
    requests: deque[Request] = field(default_factory=deque)
    """Those that were sent and have no result yet, the earliest first."""


class WorkersEngine(LocalEngine):
    """See `LocalEngine`. The clients with the most examples begin first."""

    def __init__(self, context: EngineContext, workers: int) -> None:
        """Start the processes. Raises TaskError if the task's model cannot be made."""
        self._context = context
        self._folder = TemporaryDirectory(prefix="fl-bundles-", dir=context.update_files.folder)
        self._exchange = 0
        self._workers: list[_Worker] = []
        work = ClientWork(context)
        for number in range(workers):
            self._workers.append(_start(f"worker-{number}", work, [each.connection for each in self._workers]))

    def begin(self, bundles: Bundles) -> None:
        """See `LocalEngine.begin`. No work is in progress then, so the files of the last bundles are not needed."""
        for path in Path(self._folder.name).iterdir():
            path.unlink()
        self._exchange += 1
        files = {}
        for number, (key, bundle) in enumerate(bundles.items()):
            path = Path(self._folder.name) / f"{self._exchange}-{number}"
            path.write_bytes(packed(bundle.tensors, bundle.layout))
            files[key] = bundle.layout, path
        for worker in self._workers:
            _send(worker, StoredBundles(files))

    def share(self, parts: Sequence[Part]) -> list[PartResult] | None:
        """See `LocalEngine.share`."""
        if any(worker.requests for worker in self._workers) or len(parts) > len(self._workers):
            return None
        busy = self._workers[: len(parts)]
        for worker, part in zip(busy, parts, strict=True):
            _ask(worker, part)
        return [result for worker in busy if isinstance(result := _receive(worker), list)]

    def close(self) -> None:
        """See `LocalEngine.close`."""
        for worker in self._workers:
            worker.process.kill()  # it has nothing to write at its end
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers.clear()
        self._folder.cleanup()

    def work(self, order: Order) -> Iterator[Done]:
        """See `LocalEngine.work`."""
        waiting = deque(sorted(order.clients, key=lambda client: self._context.size_of(client[0]), reverse=True))

        def send_next(worker: _Worker) -> None:
            """Send what a worker can have now. Near the end it gets one client at a time, so that no other waits."""
            while waiting and len(worker.requests) < (_AHEAD if len(waiting) > len(self._workers) else 1):
                _ask(worker, order.only([waiting.popleft()]))

        try:
            for worker in self._workers:
                send_next(worker)
            while busy := {worker.connection: worker for worker in self._workers if worker.requests}:
                for connection in wait(list(busy)):
                    worker = busy[connection]  # type: ignore[index]  # wait() returns what it was given
                    result = _receive(worker)
                    send_next(worker)
                    if not isinstance(result, list):
                        yield result
        except GeneratorExit:
            # The files of work in progress would appear later, perhaps those of a client that works again then.
            for worker in self._workers:
                while worker.requests:
                    _receive(worker)
            raise


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


def _ask(worker: _Worker, request: Request) -> None:
    worker.requests.append(request)
    _send(worker, request)


def _send(worker: _Worker, message: StoredBundles | Request) -> None:
    try:
        worker.connection.send(message)
    except OSError as error:
        raise _ended(worker) from error


def _receive(worker: _Worker) -> Answer:
    """The next result of a worker. Raises the error that its work raised, and Refused if the worker ended."""
    try:
        result: Answer | TaskError | Refused = worker.connection.recv()
    except (EOFError, OSError) as error:
        raise _ended(worker) from error
    worker.requests.popleft()
    if isinstance(result, Exception):
        raise result
    return result


def _ended(worker: _Worker) -> Refused:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    subject = subject_of(worker.requests[0]) if worker.requests else "no client"
    return Refused(
        f"the process that did the work of {subject} ended unexpectedly ({how}): if the machine ran out of memory, use "
        "fewer --workers"
    )
