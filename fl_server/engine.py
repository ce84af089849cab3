"""What a run computes: first model, server step, what is sent down, evaluation. Blocking; called from worker threads.

Everything that passes from round to round is in a Snapshot; the engine itself keeps only what never changes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import algorithms as fl
from algorithms import tree
from fl_server.broadcast import Broadcast, make_broadcast
from fl_server.errors import InvalidInput
from fl_server.reduce import average_buffers, sum_updates
from fl_server.run_config import RunConfig
from fl_server.sampling import initial_model_seed
from fl_server.store.checkpoints import Checkpoint
from protos.codec import Layout
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_DIRECTION, RESOURCE_KIND_FROZEN, RESOURCE_KIND_MODEL
from tasks import Examples, Task
from tasks.base import task_code
from tasks.evaluation import evaluate


class Diverged(Exception):
    """The aggregate is not finite: the last good model stays."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed model, or the first one."""

    round: int
    """The round that made it; -1 for the first model."""
    state: fl.ServerState
    buffers: fl.Tensors


@dataclass(frozen=True, slots=True)
class StepNorms:
    """How long the vectors of a step were, for the metrics."""

    aggregate: float
    """L2 norm of x_{t+1} - x_t."""
    direction: float
    """L2 norm of what was sent beside the model; 0 without."""
    cosine: float
    """Between the movement and minus the direction (both point downhill then); 0 where one of them is zero."""


class Engine:
    """One run's task and algorithm."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        self.config = config
        self.algorithm = require_one_delta(fl.build(config.algorithm.name, **config.algorithm.parameters))
        self._task = task
        self._model = _first_model(task, config.seed)
        first = fl.read_state(self._model)
        self._first = first
        self.frozen = first.frozen
        """Of the first model, wherever that came from."""
        self.layout = Layout.of({**first.trainable, **first.buffers}, trainable=first.trainable.keys())
        self._direction_layout = Layout.of(first.trainable, trainable=first.trainable.keys())
        self._held_out: Examples | None = None
        self._evaluating = threading.Lock()

    def first(self) -> Snapshot:
        """The state before round 0. Raises InvalidInput if the file named by `initial_model` does not fit."""
        start = self._first
        if self.config.initial_model:
            start = _from_file(self._model, Path(self.config.initial_model))
            self.frozen = start.frozen
        return Snapshot(-1, self.algorithm.init(start.trainable), start.buffers)

    def to_checkpoint(self, snapshot: Snapshot, facts: dict[str, object]) -> Checkpoint:
        """What to save of a snapshot."""
        return Checkpoint({**snapshot.state.x, **snapshot.buffers, **self.frozen}, snapshot.state.memory, facts)

    def from_checkpoint(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot that was saved."""
        x = {name: checkpoint.model[name] for name in self._first.trainable}
        buffers = {name: checkpoint.model[name] for name in self._first.buffers}
        self.frozen = {name: checkpoint.model[name] for name in self._first.frozen}
        memory = {symbol: dict(tensors) for symbol, tensors in checkpoint.memory.items()}
        return Snapshot(checkpoint.facts["round"], fl.ServerState(x, memory), buffers)

    def broadcasts(self, snapshot: Snapshot, chunk_bytes: int) -> tuple[Broadcast, ...]:
        """What the clients of the next round fetch: model, direction, frozen parts, those that there are."""
        model = {**snapshot.state.x, **snapshot.buffers}
        sent = [make_broadcast(RESOURCE_KIND_MODEL, model, self.layout, chunk_bytes)]
        direction = self.algorithm.direction(snapshot.state)
        if direction is not None:
            sent.append(make_broadcast(RESOURCE_KIND_DIRECTION, direction, self._direction_layout, chunk_bytes))
        if self.frozen:
            sent.append(make_broadcast(RESOURCE_KIND_FROZEN, self.frozen, Layout.of(self.frozen), chunk_bytes))
        return tuple(sent)

    def step(
        self, snapshot: Snapshot, cohort: Sequence[fl.UpdateInfo], paths: Sequence[Path]
    ) -> tuple[Snapshot, StepNorms]:
        """Reduce the accepted updates and apply the server half. Raises Diverged; the snapshot is not changed."""
        round_ = snapshot.round + 1
        info = self._round_info(round_, len(cohort))
        wanted = self.algorithm.sums(cohort, info)
        totals = sum_updates(paths, self.layout, [row.coefficients for row in wanted.values()])
        state = self.algorithm.server_step(snapshot.state, dict(zip(wanted, totals, strict=True)), info)
        buffers = average_buffers(paths, self.layout, self.algorithm.weights(cohort))
        norms = _norms(snapshot.state, state, self.algorithm.direction(snapshot.state))
        if not all(bool(torch.isfinite(tree.norm(part))) for part in (state.x, *state.memory.values())):
            raise Diverged(
                f"the model of round {round_} is not finite; the model of round {round_ - 1} stays. Lower the learning "
                "rate, or set round.max_update_norm"
            )
        return Snapshot(round_, state, buffers), norms

    def _round_info(self, round_: int, cohort_size: int) -> fl.RoundInfo:
        rate = self.config.local.learning_rate_in
        return fl.RoundInfo(
            round_,
            rate(round_),
            previous_learning_rate=rate(round_ - 1) if round_ else None,
            rounds=self.config.stop.rounds,
            population=self.config.population or None,
            cohort_size=cohort_size,
        )

    def evaluate(self, snapshot: Snapshot) -> dict[str, float]:
        """The task's metrics on the server's held-out examples, which are read once. One at a time."""
        with self._evaluating:
            if self._held_out is None:
                with task_code("the task's eval_data()"):
                    self._held_out = self._task.eval_data()
            fl.load_state(self._model, fl.ModelState(snapshot.state.x, snapshot.buffers, self.frozen))
            return evaluate(self._task, self._model, self._held_out, self.config.evaluation.batch_size)


def require_one_delta(algorithm: fl.Algorithm) -> fl.Algorithm:
    """The algorithm, if one delta a round from clients that keep nothing is all that it asks for.

    Raises AlgorithmError for the others: the wire has messages for them, coordinator and daemon do not use them yet.
    """
    sent = [", ".join(exchange.payloads) for exchange in algorithm.exchanges]
    if sent != ["delta"] or algorithm.keeps_client_state:
        state = "a state" if algorithm.keeps_client_state else "nothing"
        raise fl.AlgorithmError(
            f"expected a method whose clients send one delta a round and keep nothing, got {algorithm.name}, "
            f"whose clients send {'; then '.join(sent)} and keep {state}"
        )
    return algorithm


def _first_model(task: Task, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(initial_model_seed(seed))
        with task_code("the task's model()"):
            return task.model()


def _from_file(model: nn.Module, path: Path) -> fl.ModelState:
    """The values of a safetensors file with the model's own names."""
    try:
        values = load_file(path)
        model.load_state_dict(values, strict=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidInput("initial_model", "a safetensors file of this task's model on the server", error) from error
    return fl.read_state(model)


def _norms(before: fl.ServerState, after: fl.ServerState, direction: fl.Tensors | None) -> StepNorms:
    movement = tree.subtract(after.x, before.x)
    length = float(tree.norm(movement))
    if direction is None:
        return StepNorms(length, 0.0, 0.0)
    size = float(tree.norm(direction))
    product = sum(float((movement[name].double() * -direction[name].double()).sum()) for name in movement)
    return StepNorms(length, size, product / (length * size) if length and size else 0.0)
