"""One client's work in a simulation: the daemon's trainer, with the update written to the spool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from extensions.optimizers import load_optimizers
from fl_client.errors import WorkFailed
from fl_client.training.local_model import LocalModel
from fl_client.training.trainer import Trainer
from fl_ops.simulate.engines.engine import Bundles, EngineContext, Evaluated, Failed, Trained
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment
from tasks import Task


class ClientWork:
    """Does the work of one client after the other with one model."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        # The run's file is of this machine's user, so the class that it names may be imported.
        self._optimizers = load_optimizers([context.optimizer])
        self._model = LocalModel(lambda: _new_model(context.task))
        self._model.module()  # an error of the task's code is found now

    def train(self, common: Assignment, client: str, seed: int, bundles: Bundles) -> Trained | Failed:
        """Train a client, write its update and its next state."""
        local = self._context.clients[client]
        assignment = Assignment()
        assignment.CopyFrom(common)
        assignment.training.seed = seed
        assignment.fingerprint.CopyFrom(local.fingerprint)
        state = self._context.states.get(client)
        try:
            with one_thread():
                trainer = Trainer(local, self._model, optimizers=self._optimizers)
                trained = trainer.train(assignment, bundles, state, _never_cancelled)
        except WorkFailed as error:
            return Failed.of(client, error)
        path = self._context.update_path(assignment.key.exchange, client)
        with path.open("wb") as file:
            file.writelines(trained.update.pieces)
        if trained.next_state is not None:
            self._context.states.put_next(client, trained.next_state)
        return Trained(client, trained.update.header, path, trainer.examples, trainer.own_batches)

    def evaluate(self, common: EvaluationAssignment, client: str, bundles: Bundles) -> Evaluated | Failed:
        """Evaluate the model, with the client's personal values if it has them."""
        local = self._context.clients[client]
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
        return task.model()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread, as a CPU daemon does by default: the number of threads changes the last bits of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
