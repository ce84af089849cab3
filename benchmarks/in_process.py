"""A whole federated run in one process, round for round what a coordinator and its daemons do: to search settings.

Cohorts, seeds and the first model come from the coordinator's own functions, the mathematics from `algorithms`, the
data from `tasks`; only the network is missing. For models without buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import algorithms as fl
from fl_server.sampling import Draw, draw_fixed, initial_model_seed, training_seed
from tasks import Examples, Task
from tasks.batches import batches, seed_everything
from tasks.evaluation import evaluate


@dataclass(frozen=True)
class RunSettings:
    """What a run is told, by the names of a run's TOML file."""

    algorithm: fl.Algorithm
    learning_rate: float
    seed: int
    rounds: int = 40
    clients_per_round: int = 2
    epochs: int = 5
    batch_size: int = 16


class InProcessRun:
    """A task, the training examples of each client by its id, and the run's settings."""

    def __init__(self, task: Task, shards: Mapping[str, Examples], settings: RunSettings) -> None:
        self._task = task
        self._shards = shards
        self._settings = settings
        seed_everything(initial_model_seed(settings.seed))
        self._model = task.model()

    def accuracies(self, held_out: Examples) -> list[float]:
        """Accuracy on `held_out` after each round."""
        settings = self._settings
        state = settings.algorithm.init(fl.read_state(self._model).trainable)
        reached = []
        for round_ in range(settings.rounds):
            cohort = draw_fixed(self._shards, settings.clients_per_round, Draw(settings.seed, round_, 0))
            updates = [self._update(state, client, round_) for client in cohort]
            state = fl.apply_updates(settings.algorithm, state, updates, fl.RoundInfo(round_, settings.learning_rate))
            self._load(state)
            reached.append(evaluate(self._task, self._model, held_out)["accuracy"])
        return reached

    def _update(self, state: fl.ServerState, client: str, round_: int) -> tuple[fl.UpdateInfo, fl.Tensors]:
        settings, examples = self._settings, self._shards[client]
        self._load(state)
        seed = training_seed(settings.seed, round_, client)
        seed_everything(seed)
        data = batches(examples, settings.batch_size, seed, epochs=settings.epochs)
        rule = settings.algorithm.local_rule(settings.algorithm.direction(state))
        local = fl.LocalSettings(settings.learning_rate)
        result = fl.train_locally(self._model, data, self._task.loss, rule, local)
        return fl.UpdateInfo(client, len(examples), result.steps), result.delta

    def _load(self, state: fl.ServerState) -> None:
        fl.load_state(self._model, fl.ModelState(state.x, {}, fl.read_state(self._model).frozen))
