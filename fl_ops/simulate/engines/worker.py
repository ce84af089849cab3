"""The process of a worker: gets messages, does the work of one client after the other, sends results."""

from __future__ import annotations

import mmap
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path

from algorithms.outside_code import described
from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_ops.errors import Refused
from fl_ops.simulate.engines.client_work import ClientWork
from fl_ops.simulate.engines.engine import Bundles, Evaluated, Failed, Order, Part, PartResult, Trained
from fl_ops.worker_process import become_worker
from fl_tasks import TaskError
from protos.codec import Layout, unpack


@dataclass(frozen=True)
class StoredBundles:
    """The bundles of all work that follows: their bytes are in files, which exist until the next such message."""

    files: Mapping[ResourceKey, tuple[Layout, Path]]

    @cached_property
    def loaded(self) -> Bundles:
        """The bundles with their files mapped. All processes share the memory of the pages that they do not change."""
        return {key: Bundle(layout, unpack(_mapped(path), layout)) for key, (layout, path) in self.files.items()}


def _mapped(path: Path) -> bytearray | memoryview:
    if not path.stat().st_size:
        return bytearray()
    with path.open("rb") as file:
        # A private copy, because torch warns of memory that it may not write. Nothing writes into it.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


Request = Order | Part
"""The work of one client, or a part of the server's work."""
Answer = Trained | Evaluated | Failed | PartResult


def subject_of(request: Request) -> str:
    """What is at work, for errors."""
    return request.clients[0][0] if isinstance(request, Order) else "a part of the server's work"


def serve(work: ClientWork, connection: Connection, inherited: Sequence[Connection]) -> None:
    """Do what the messages ask for, until the other end is closed. Runs in the forked process.

    inherited: ends of pipes that belong to the other processes.
    """
    become_worker()
    for each in inherited:
        each.close()
    bundles = StoredBundles({})
    # The other process has ended when its end of the pipe is closed.
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if isinstance(message, StoredBundles):
                bundles = message
            else:
                connection.send(_answer(work, message, bundles))


def _answer(work: ClientWork, request: Request, bundles: StoredBundles) -> Answer | TaskError | Refused:
    """The result of a request, or the error that ends the run: as text, since not every error can be sent."""
    try:
        if isinstance(request, Order):
            return work.done(request, request.clients[0], bundles.loaded)
        return work.part(request)
    except TaskError as error:
        return TaskError(str(error))
    except BaseException as error:  # noqa: BLE001 - any error ends the run, as it does in one process
        refused = Refused(f"the work of {subject_of(request)} ended with {described(error)}")
        refused.trace = traceback.format_exc()
        return refused
