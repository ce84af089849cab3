"""One client's work in a simulation: the daemon's trainer, with the update written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from algorithms.base import Memory
from fl_client.errors import WorkFailed
from fl_client.settings.config import Precision
from fl_client.settings.device import Compute
from fl_client.training.local_model import LocalModel
from fl_client.training.private import PrivateWork, applied_to, private_work
from fl_client.training.private_data import private_data
from fl_client.training.results import PreparedWork, TrainingResult
from fl_client.training.trainer import Trainer
from fl_common.privacy.secret_stream import SECRET_BYTES, derived
from fl_extensions.methods import load_optimizers
from fl_ops.simulate.engines.engine import (
    Bundles,
    Client,
    Done,
    EngineContext,
    Evaluated,
    ExamplesOf,
    Failed,
    LocalEngine,
    Order,
    Part,
    PartResult,
    Trained,
)
from fl_server.admission.norms import UpdateContent, read_update
from fl_server.aggregation.methods import optimizer_spec
from fl_tasks import Task
from fl_tasks.new_model import new_model
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Assigned:
    """A client with its assignment, and the trainer for its data."""

    client: str
    assignment: Assignment
    trainer: Trainer
    state: Memory | None
    """The client's state after its last round that counted."""

    def private(self, bundles: Bundles) -> PrivateWork | None:
        """The private steps, for a run with privacy. Raises WorkFailed."""
        if not self.assignment.training.HasField("privacy"):
            return None
        applied = applied_to(self.assignment.training)
        data = private_data(self.trainer.local.train)
        return private_work(self.assignment, bundles, data, simulated_secret(self.client), applied)

    def prepare(self, bundles: Bundles) -> PreparedWork:
        """The model with the values of the bundles, and all that the training needs. Raises WorkFailed."""
        return self.trainer.prepare(self.assignment, bundles, self.state, _never_cancelled)


def simulated_secret(client: str) -> bytes:
    """The secret of a simulated device's data. It is no secret: a simulation protects nobody, its data is all here."""
    return derived(bytes(SECRET_BYTES), "a simulated device", client)


class ClientWork:
    """Does the work of one client after the other with one model."""

    def __init__(self, context: EngineContext, device: torch.device = CPU, precision: Precision = "float32") -> None:
        """device: of the model, and of the clients' data. precision: of its passes, as a daemon's setting."""
        self._context = context
        # The run's file is of this machine's user, so the class that it names may be imported.
        self._optimizers = load_optimizers([optimizer_spec(context.config.local).name])
        # In one memory format on all devices: images with a client dimension have no other.
        compute = Compute(precision, memory_format="contiguous")
        self._model = LocalModel(lambda: _new_model(context.task), lambda module: compute.prepared(module, device))
        self._model.module()  # an error of the task's code is found now

    def done(self, order: Order, client: Client, bundles: Bundles) -> Trained | Evaluated | Failed:
        """The result of the work of one client."""
        if isinstance(order.common, Assignment):
            return self.train(order.common, *client, bundles)
        return self.evaluate(order.common, client[0], bundles, order.on)

    def train(self, common: Assignment, client: str, seed: int, bundles: Bundles) -> Trained | Failed:
        """Train a client, write its update and its next state."""
        assigned = self.assigned(common, client, seed)
        try:
            with one_thread():
                private = assigned.private(bundles)
                trained = assigned.trainer.train(
                    assigned.assignment, bundles, assigned.state, _never_cancelled, private
                )
        except WorkFailed as error:
            return Failed.of(client, error)
        return self.deliver(assigned, trained)

    def assigned(self, common: Assignment, client: str, seed: int) -> Assigned:
        """A client with its assignment."""
        with one_thread():
            local = self._context.clients[client]
        assignment = Assignment()
        assignment.CopyFrom(common)
        assignment.training.seed = seed
        assignment.fingerprint.CopyFrom(local.fingerprint)
        trainer = Trainer(local, self._model, optimizers=self._optimizers)
        return Assigned(client, assignment, trainer, self._context.states.get(client))

    def deliver(self, assigned: Assigned, trained: TrainingResult) -> Trained:
        """Write a client's update and its next state."""
        path = self._context.update_files.write(
            assigned.assignment.key.exchange, assigned.client, trained.update.pieces
        )
        if trained.next_state is not None:
            self._context.states.put_next(assigned.client, trained.next_state)
        data = assigned.trainer.local.train
        return Trained(
            assigned.client,
            trained.update.header,
            path,
            len(data),
            data.own_batches,
            self._content(assigned, path),
        )

    def _content(self, assigned: Assigned, path: Path) -> UpdateContent | None:
        """What admission has to read of an update, here where its bytes are in the processor's cache.

        None: the process of the rounds reads it, which has what is needed to decode it.
        """
        server, exchange = self._context.server, assigned.assignment.key.exchange
        if server is None or not server.shapes[exchange].plain:
            return None
        with one_thread():
            return read_update(path, server.shapes[exchange])

    def part(self, part: Part) -> PartResult:
        """Do a part of the server's work."""
        if self._context.server is None:
            raise RuntimeError("expected the server's half of the run in this process, got a part of its work without")
        with one_thread():
            return part.result(self._context.server)

    def evaluate(
        self, common: EvaluationAssignment, client: str, bundles: Bundles, on: ExamplesOf
    ) -> Evaluated | Failed:
        """Evaluate the model, with the client's personal values if it has them."""
        local = self._context.clients[client]
        if on == "training":
            local = replace(local, held_out=local.train)
        assignment = EvaluationAssignment()
        assignment.CopyFrom(common)
        assignment.fingerprint.CopyFrom(local.fingerprint)
        try:
            with one_thread():
                state = self._context.states.get(client)
                return Evaluated(client, Trainer(local, self._model).evaluate(assignment, bundles, state))
        except WorkFailed as error:
            return Failed.of(client, error)


def _never_cancelled(step: int, steps: int) -> None:
    """Called after each local step. A simulation never cancels training."""


def _new_model(task: Task) -> torch.nn.Module:
    """The module that all clients train with; its initial values are never used."""
    with torch.random.fork_rng(devices=[]):
        return new_model(task)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread, as a CPU daemon does by default: the number of threads changes the last bits of sums.

    For short operations it is also faster: threads of torch wait for each other in a loop, and on a loaded machine one
    of them has no processor.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SequentialEngine(LocalEngine):
    """See `LocalEngine`. A client works when its result is fetched, in the order given."""

    def __init__(self, context: EngineContext) -> None:
        self._work = ClientWork(context)

    def work(self, order: Order) -> Iterator[Done]:
        """See `LocalEngine.work`."""
        for client in order.clients:
            yield self._work.done(order, client, self.bundles)
