"""The process of a worker: gets messages, does the work of one client after the other, sends results."""

from __future__ import annotations

import mmap
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from algorithms.outside_code import described
from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_ops.errors import Refused
from fl_ops.simulate.engines.client_work import ClientWork
from fl_ops.simulate.engines.engine import Bundles, Evaluated, ExamplesOf, Failed, Part, PartResult, Trained
from fl_ops.worker_process import become_worker
from fl_tasks import TaskError
from protos.codec import Layout, unpack
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle whose bytes are in a file."""

    key: ResourceKey
    layout: Layout
    path: Path

    def load(self) -> Bundle:
        """The bundle with its file mapped. All processes share the memory of the pages that they do not change."""
        if not self.path.stat().st_size:
            return Bundle(self.layout, unpack(bytearray(), self.layout))
        with self.path.open("rb") as file:
            # A private copy, because torch warns of memory that it may not write. Nothing writes into it.
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return Bundle(self.layout, unpack(mapped, self.layout))


@dataclass(frozen=True, slots=True)
class Begin:
    """The bundles of all work that follows. The files exist until the next such message."""

    bundles: Sequence[StoredBundle]


@dataclass(frozen=True, slots=True)
class Train:
    """Train a client."""

    client: str
    common: bytes
    """The Assignment without what is the client's own."""
    seed: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the model on a client's examples."""

    client: str
    common: bytes
    """The EvaluationAssignment without what is the client's own."""
    on: ExamplesOf


@dataclass(frozen=True, slots=True)
class Raised:
    """The work of a client raised an error that ends the run. As text: not every error of a task can be sent."""

    client: str
    text: str
    trace: str
    in_task: bool
    """Whether it is a TaskError, which names the fault in the task or its data."""

    def error(self) -> TaskError | Refused:
        """The error to raise in the process that asked for the work."""
        if self.in_task:
            return TaskError(self.text)
        error = Refused(f"the work of {self.client} ended with {self.text}")
        error.trace = self.trace
        return error


@dataclass(frozen=True, slots=True)
class Share:
    """Do a part of the server's work."""

    part: Part

    @property
    def client(self) -> str:
        """What is at work, for errors."""
        return "a part of the server's work"


@dataclass(frozen=True, slots=True)
class Shared:
    """The result of a part."""

    result: PartResult


Request = Train | Evaluate | Share
Answer = Trained | Evaluated | Failed | Shared
Result = Answer | Raised


def serve(work: ClientWork, connection: Connection, inherited: Sequence[Connection]) -> None:
    """Do what the messages ask for, until the other end is closed. Runs in the forked process.

    inherited: ends of pipes that belong to the other processes.
    """
    become_worker()
    for each in inherited:
        each.close()
    worker = _Worker(work)
    # The other process has ended when its end of the pipe is closed.
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if isinstance(message, Begin):
                worker.begin(message)
            else:
                connection.send(worker.result(message))


class _Worker:
    def __init__(self, work: ClientWork) -> None:
        self._work = work
        self._stored: Sequence[StoredBundle] = ()
        self._bundles: Bundles | None = None

    def begin(self, message: Begin) -> None:
        self._stored, self._bundles = message.bundles, None

    def result(self, request: Request) -> Result:
        try:
            if isinstance(request, Share):
                return Shared(self._work.part(request.part))
            return self._answer(request)
        except BaseException as error:  # noqa: BLE001 - any error ends the run, as it does in one process
            in_task = isinstance(error, TaskError)
            text = str(error) if in_task else described(error)
            return Raised(request.client, text, traceback.format_exc(), in_task)

    def _answer(self, request: Train | Evaluate) -> Result:
        if self._bundles is None:
            self._bundles = {each.key: each.load() for each in self._stored}
        if isinstance(request, Train):
            assignment = Assignment.FromString(request.common)
            return self._work.train(assignment, request.client, request.seed, self._bundles)
        common = EvaluationAssignment.FromString(request.common)
        return self._work.evaluate(common, request.client, self._bundles, request.on)
