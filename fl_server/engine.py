"""What a run computes: first model, server step, what is sent down, evaluation. Blocking; called from worker threads.

Everything that passes from round to round is in a Snapshot; the engine itself keeps only what never changes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

import algorithms as fl
from algorithms import tree
from fl_server.broadcast import Outgoing
from fl_server.bundles import blank, laid_out
from fl_server.errors import InvalidInput
from fl_server.robust import Collected, chosen, reduce_buffers, refuse_unfit
from fl_server.run_config import RunConfig
from fl_server.runs.shares import capped
from fl_server.shapes import UpdateShape
from fl_server.step import Diverged, Exchanged, ServerStep, StepNorms
from fl_server.store.checkpoints import Checkpoint
from fl_server.task_model import TaskModel
from protos.codec import Layout
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_DIRECTION, RESOURCE_KIND_FROZEN, RESOURCE_KIND_MODEL
from tasks import Examples, Task
from tasks.base import task_code
from tasks.evaluation import evaluate

_NONE: Mapping[str, fl.Tensors] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed model, or the first one."""

    round: int
    """The round that made it; -1 for the first model."""
    state: fl.ServerState
    buffers: fl.Tensors


class Engine:
    """One run's task and algorithm."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        self.config = config
        self.algorithm = build_algorithm(config)
        self._task = task
        self._model = TaskModel(task, config.seed)
        self.layout, self._trainable_layout = self._model.layout, self._model.trainable_layout
        self._shapes = [
            UpdateShape.of(exchange.payloads, self.layout, self._trainable_layout)
            for exchange in self.algorithm.exchanges
        ]
        self.frozen: fl.Tensors = {}
        """Of the first model, wherever that came from; known with the first snapshot."""
        self.held_out: Examples | None = None
        self._evaluating = threading.Lock()

    def first(self) -> Snapshot:
        """The state before round 0. Raises InvalidInput if the file named by `initial_model` does not fit."""
        with self._evaluating, self._model.first(self.config.initial_model) as start:
            self.frozen = laid_out(start.frozen, Layout.of(start.frozen))
            return self._laid_out(Snapshot(-1, self.algorithm.init(start.trainable), start.buffers))

    def _laid_out(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot in memory of its own, where it lies as it is sent."""
        layout, into = self._trainable_layout, blank(self.layout)
        tree.copy_(into, {**snapshot.state.x, **snapshot.buffers})
        memory = {symbol: laid_out(tensors, layout) for symbol, tensors in snapshot.state.memory.items()}
        return self._snapshot(snapshot.round, into, memory)

    def _snapshot(self, round_: int, model: fl.Tensors, memory: fl.Memory) -> Snapshot:
        x = {entry.name: model[entry.name] for entry in self.layout.entries if entry.trainable}
        buffers = {entry.name: model[entry.name] for entry in self.layout.entries if not entry.trainable}
        return Snapshot(round_, fl.ServerState(x, memory), buffers)

    def to_checkpoint(self, snapshot: Snapshot, facts: dict[str, object]) -> Checkpoint:
        """What to save of a snapshot."""
        return Checkpoint({**snapshot.state.x, **snapshot.buffers, **self.frozen}, snapshot.state.memory, facts)

    def from_checkpoint(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot that was saved."""
        with self._evaluating:
            self._model.release()
        sent = {entry.name for entry in self.layout.entries}
        frozen = {name: tensor for name, tensor in checkpoint.model.items() if name not in sent}
        self.frozen = laid_out(frozen, Layout.of(frozen))
        memory = {symbol: dict(tensors) for symbol, tensors in checkpoint.memory.items()}
        saved = self._snapshot(checkpoint.facts["round"], dict(checkpoint.model), memory)
        return self._laid_out(saved)

    def shape(self, exchange: int) -> UpdateShape:
        """What an update of an exchange is made of."""
        return self._shapes[exchange]

    def outgoing(self, snapshot: Snapshot, exchange: int = 0, sums: Mapping[str, fl.Tensors] = _NONE) -> list[Outgoing]:
        """What the clients of an exchange load: model, direction, frozen parts, those that there are.

        Args:
            snapshot: of the round before.
            exchange: of the round under way.
            sums: what the round's earlier exchanges came to.
        """
        model = {**snapshot.state.x, **snapshot.buffers}
        sent = [Outgoing(RESOURCE_KIND_MODEL, model, self.layout)]
        direction = self.algorithm.exchanges[exchange].direction(snapshot.state, sums)
        if direction is not None:
            sent.append(Outgoing(RESOURCE_KIND_DIRECTION, direction, self._trainable_layout))
        if self.frozen:
            sent.append(Outgoing(RESOURCE_KIND_FROZEN, self.frozen, Layout.of(self.frozen)))
        return sent

    def reduce(
        self, snapshot: Snapshot, exchange: int, cohort: Sequence[fl.UpdateInfo], paths: Sequence[Path]
    ) -> dict[str, fl.Tensors]:
        """The sums that the method wants of an exchange's accepted updates, in the order of client id bytes.

        With the run's reducer in the place of the mean. Raises Diverged.
        """
        collected = Collected(self._weighed(cohort), paths, self.shape(exchange))
        sums = self._exchanged(snapshot, exchange, collected).sums()
        for symbol, tensors in sums.items():
            if not bool(torch.isfinite(tree.norm(tensors))):
                raise Diverged(
                    f"the sum {symbol} of round {snapshot.round + 1} is not finite; the model of round "
                    f"{snapshot.round} stays. Lower the learning rate"
                )
        return sums

    def _weighed(self, cohort: Sequence[fl.UpdateInfo]) -> Sequence[fl.UpdateInfo]:
        """The cohort as it weighs: nobody with more than its share of the examples, where the run has such a limit."""
        share = self.config.round.max_client_share
        return capped(cohort, share) if share and max(self.algorithm.weights(cohort)) > share else cohort

    def _exchanged(self, snapshot: Snapshot, exchange: int, collected: Collected) -> Exchanged:
        info = self._round_info(snapshot.round + 1, len(collected.cohort))
        return Exchanged(self.algorithm, exchange, self.config.round, info, collected)

    def step(
        self,
        snapshot: Snapshot,
        cohort: Sequence[fl.UpdateInfo],
        paths: Sequence[Path],
        before: Mapping[str, fl.Tensors] = _NONE,
    ) -> tuple[Snapshot, StepNorms]:
        """Reduce the last exchange's accepted updates and apply the server half. Raises Diverged; changes no snapshot.

        before: the sums of the round's earlier exchanges.
        """
        last = len(self.algorithm.exchanges) - 1
        sent, cohort = cohort, self._weighed(cohort)
        collected = Collected(cohort, paths, self.shape(last))
        taken = chosen(self.config.round, collected)
        memory = {symbol: blank(self._trainable_layout) for symbol in snapshot.state.memory}
        made = self._snapshot(snapshot.round + 1, blank(self.layout), memory)
        step = ServerStep(self._exchanged(snapshot, last, taken), before)
        norms = step.apply(snapshot.state, made.state, self._trainable_layout)
        if made.buffers:
            tree.copy_(made.buffers, reduce_buffers(self.config.round, collected, self.algorithm.weights(cohort)))
        weights = self.algorithm.weights(cohort)
        return made, replace(
            norms,
            left_out=_missing(cohort, taken.cohort),
            capped=_lighter(sent, self.algorithm.weights(sent), weights),
            largest=max(zip(weights, (info.client_id for info in cohort), strict=True))[::-1],
        )

    def restart(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with what the server keeps of the clients' states at its start; the model stays."""
        return replace(snapshot, state=self.algorithm.restart(snapshot.state))

    def _round_info(self, round_: int, cohort_size: int) -> fl.RoundInfo:
        rate = self.config.local.learning_rate_in
        return fl.RoundInfo(
            round_,
            rate(round_),
            previous_learning_rate=rate(round_ - 1) if round_ else None,
            rounds=self.config.horizon,
            population=self.config.population or None,
            population_examples=self.config.population_examples or None,
            cohort_size=cohort_size,
        )

    def evaluate(self, snapshot: Snapshot) -> dict[str, float]:
        """The task's metrics on the server's held-out examples, which are read once. One at a time."""
        with self._evaluating:
            if self.held_out is None:
                with task_code("the task's eval_data()"):
                    self.held_out = self._task.eval_data()
            with self._model.filled(fl.ModelState(snapshot.state.x, snapshot.buffers, self.frozen)) as model:
                return evaluate(self._task, model, self.held_out, self.config.evaluation.batch_size)


def build_algorithm(config: RunConfig) -> fl.Algorithm:
    """The run's method, with what it needs to know of the population.

    Raises:
        AlgorithmError: the method or its parameters are not to be had.
        InvalidInput: the run does not say what the method needs, or its reducer does not go with it.
    """
    algorithm = fl.build(config.algorithm.name, **config.algorithm.parameters)
    refuse_unfit(config.round, algorithm)
    smallest = config.round.clients_per_round if config.round.sampling == "fixed" else 1
    if algorithm.needs_population and config.population < smallest:
        raise InvalidInput(
            "population",
            f"N, the clients that the run may ever draw from, {smallest} or more: {algorithm.name} needs it",
            config.population,
        )
    if algorithm.objective == "examples" and config.round.max_client_share:
        raise InvalidInput(
            "round.max_client_share",
            '0 with objective = "examples", for clients weigh their own steps by their examples',
            config.round.max_client_share,
        )
    if algorithm.objective == "examples" and not config.population_examples:
        raise InvalidInput(
            "population_examples", 'the examples of all clients together, for objective = "examples"', "nothing"
        )
    return algorithm


def complete(config: RunConfig) -> RunConfig:
    """The configuration with all that its defaults stand for: what is kept, shown and written beside results.

    Raises:
        AlgorithmError: the method or its parameters are not to be had.
    """
    parameters = dict(fl.build(config.algorithm.name, **config.algorithm.parameters).parameters)
    algorithm = config.algorithm.model_copy(update={"parameters": parameters})
    return config.model_copy(update={"algorithm": algorithm, "planned_rounds": config.horizon})


def _lighter(cohort: Sequence[fl.UpdateInfo], before: Sequence[float], after: Sequence[float]) -> tuple[str, ...]:
    return tuple(info.client_id for info, was, now in zip(cohort, before, after, strict=True) if now < was)


def _missing(cohort: Sequence[fl.UpdateInfo], taken: Sequence[fl.UpdateInfo]) -> tuple[str, ...]:
    ids = {info.client_id for info in taken}
    return tuple(info.client_id for info in cohort if info.client_id not in ids)
