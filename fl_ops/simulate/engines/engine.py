"""The interface of an engine: assignments and bundles in, updates in files and metrics out."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import algorithms as fl
from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_client.errors import WorkFailed
from fl_client.training.data import LocalTask
from fl_client.training.results import Evaluation
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.engines.held import TrainedTogether
from fl_ops.simulate.run_files import SimulatedStates, UpdateFiles
from fl_server.admission.norms import UpdateContent
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.snapshot import Snapshot
from fl_server.aggregation.updates import read_block
from fl_server.run_settings.config import RunConfig
from fl_tasks import Task
from fl_tasks.evaluation import BatchSums
from protos.codec import Entry, unpack
from protos.fl.v1.coordinator_pb2 import FailureReason
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment, UpdateHeader


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """The batches of the held-out examples from `first` up to `last`."""

    model: Path
    """The model's parameters and buffers, packed by the engine's layout."""
    first: int
    last: int

    def result(self, server: Engine) -> list[BatchSums]:
        """The metrics of each batch. Raises TaskError."""
        tensors = unpack(bytearray(self.model.read_bytes()), server.layout)
        trainable = {entry.name for entry in server.layout.entries if entry.trainable}
        parameters = {name: tensor for name, tensor in tensors.items() if name in trainable}
        buffers = {name: tensor for name, tensor in tensors.items() if name not in trainable}
        return server.model.evaluate_part(Snapshot(-1, fl.ServerState(parameters, {}), buffers), self.first, self.last)


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor, or of several neighbours, and the place of its sums in the output."""

    entry: Entry
    start: int
    count: int
    output: int
    """Offset in bytes within a row."""


@dataclass(frozen=True, slots=True)
class SumPart:
    """Weighted sums of some blocks of the updates."""

    updates: Sequence[Path]
    rows: Sequence[Sequence[float]]
    """Coefficients of the updates, for each sum."""
    pieces: Sequence[Piece]
    output: Path
    """A file of the final size: all sums, one row after the other."""
    row_bytes: int

    def result(self, server: Engine) -> list[BatchSums]:
        """Write the sums. Raises StoreError, LayoutError: a file is gone or too short."""
        del server
        descriptor = os.open(self.output, os.O_WRONLY)
        try:
            for piece in self.pieces:
                blocks = (read_block(path, piece.entry, piece.start, piece.count) for path in self.updates)
                for row, total in enumerate(fl.weighted_sums(blocks, self.rows)):
                    os.pwrite(descriptor, total.numpy().data, row * self.row_bytes + piece.output)
        finally:
            os.close(descriptor)
        return []


ExamplesOf = Literal["held_out", "training"]
"""The examples of a client on which a model is evaluated: its held-out ones, as by a daemon, or those of its training.
"""

Part = EvaluationPart | SumPart
PartResult = list[BatchSums]


Bundles = Mapping[ResourceKey, Bundle]


@dataclass(frozen=True, slots=True)
class Trained:
    """One client's update. Its next state, if it has one, is pending in the run's SimulatedStates."""

    client: str
    header: UpdateHeader
    update: Path
    """The file of the payloads' bytes."""
    examples: int
    """Number of the client's training examples."""
    own_batches: int
    """Batches of an epoch that the task makes itself; 0 if the run's batch size applies."""
    content: UpdateContent | None = None
    """What admission has to know of the file. None: it is still to be read."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What a client measured."""

    client: str
    found: Evaluation


@dataclass(frozen=True, slots=True)
class Failed:
    """A client that could not do its work, as a daemon reports it."""

    client: str
    reason: FailureReason
    why: str
    trace: str = ""
    """The traceback of the task's own code, if that code raised an error."""
    cause: str = ""
    """Type and place of that error."""

    @classmethod
    def of(cls, client: str, error: WorkFailed) -> Failed:
        """The failure that an error reports."""
        if (raised := error.raised) is None:
            return cls(client, error.reason, str(error))
        cause = f"{raised.error_type} ({raised.place or error})"
        return cls(client, error.reason, str(error), raised.traceback, cause)


@dataclass(frozen=True, slots=True)
class EngineContext:
    """A run as its engine sees it: the same for all rounds."""

    clients: Mapping[str, LocalTask]
    """Each client's task and data, by id; looked up whenever the client works, and not kept."""
    task: Task
    """Makes the model that the clients train."""
    config: RunConfig
    states: SimulatedStates
    update_files: UpdateFiles
    server: Engine | None = None
    """The server's half of the run. None: in another process, which reads updates itself."""

    def size_of(self, client: str) -> int:
        """Number of a client's training examples, without a copy of them where that is possible."""
        clients = self.clients
        return clients.size_of(client) if isinstance(clients, SimulatedClients) else len(clients[client].train)


Client = tuple[str, int]
"""Id and training seed; the seed is 0 for an evaluation."""
Done = Trained | TrainedTogether | Evaluated | Failed


@dataclass(frozen=True, slots=True)
class Order:
    """Work for clients: to train, or to evaluate the model."""

    common: Assignment | EvaluationAssignment
    """The assignment without what is the client's own. It says which work it is."""
    clients: Sequence[Client]
    on: ExamplesOf = "held_out"
    """The examples of an evaluation."""

    def only(self, clients: Sequence[Client]) -> Order:
        """The same work for some of the clients."""
        return replace(self, clients=clients)


class LocalEngine(ABC):
    """Does the work of clients. For one thread. An engine of one process inherits what the others add."""

    bundles: Bundles
    """The bundles in use."""

    @property
    def report(self) -> str:
        """What it has measured and chosen, for the user; empty if nothing yet."""
        return ""

    def begin(self, bundles: Bundles) -> None:
        """Use these bundles from now on."""
        self.bundles = bundles

    @abstractmethod
    def work(self, order: Order) -> Iterator[Done]:
        """Do the work of each client once, and yield the results in any order. Clients in lockstep have one result.

        Work of clients whose results are not fetched is stopped or finished, and has no effect.
        """

    def share(self, parts: Sequence[Part]) -> list[PartResult] | None:
        """Do parts of the server's work in as many processes; returns their results in order.

        None: this engine has no other processes, or they are at work.
        """
        del parts
        return None

    def close(self) -> None:  # noqa: B027 - most engines have nothing to release
        """Release memory and processes. Work in progress is stopped."""
