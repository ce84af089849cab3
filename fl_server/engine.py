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
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import algorithms as fl
from algorithms import tree
from fl_server.broadcast import Outgoing
from fl_server.errors import InvalidInput
from fl_server.robust import Collected, chosen, reduce_buffers, reduce_payloads, refuse_unfit
from fl_server.run_config import RunConfig
from fl_server.sampling import initial_model_seed
from fl_server.shapes import UpdateShape
from fl_server.store.checkpoints import Checkpoint
from protos.codec import Layout
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_DIRECTION, RESOURCE_KIND_FROZEN, RESOURCE_KIND_MODEL
from tasks import Examples, Task
from tasks.base import task_code
from tasks.evaluation import evaluate

_NONE: Mapping[str, fl.Tensors] = MappingProxyType({})


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
    left_out: tuple[str, ...] = ()
    """Clients whose accepted updates a choosing reducer did not take."""


class Engine:
    """One run's task and algorithm."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        self.config = config
        self.algorithm = build_algorithm(config)
        self._task = task
        self._model = _first_model(task, config.seed)
        first = fl.read_state(self._model)
        self._first = first
        self.frozen = first.frozen
        """Of the first model, wherever that came from."""
        self.layout = Layout.of({**first.trainable, **first.buffers}, trainable=first.trainable.keys())
        self._trainable_layout = Layout.of(first.trainable, trainable=first.trainable.keys())
        self.held_out: Examples | None = None
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

    def shape(self, exchange: int) -> UpdateShape:
        """What an update of an exchange is made of."""
        return UpdateShape.of(self.algorithm.exchanges[exchange].payloads, self.layout, self._trainable_layout)

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

        With the run's reducer in the place of the mean.
        """
        return self._reduce(snapshot, exchange, Collected(cohort, paths, self.shape(exchange)))

    def _reduce(self, snapshot: Snapshot, exchange: int, collected: Collected) -> dict[str, fl.Tensors]:
        cohort = collected.cohort
        info = self._round_info(snapshot.round + 1, len(cohort))
        wanted = self.algorithm.exchanges[exchange].sums(cohort, info)
        return reduce_payloads(self.config.round, collected, wanted, self.algorithm.weights(cohort))

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
        round_, last = snapshot.round + 1, len(self.algorithm.exchanges) - 1
        collected = Collected(cohort, paths, self.shape(last))
        taken = chosen(self.config.round, collected)
        sums = {**before, **self._reduce(snapshot, last, taken)}
        info = self._round_info(round_, len(taken.cohort))
        try:
            state = self.algorithm.server_step(snapshot.state, sums, info)
        except RuntimeError as error:
            # A factor that the model's dtype cannot hold: torch does not make an infinity of it.
            if "overflow" not in str(error):
                raise
            raise Diverged(
                f"the model of round {round_} is not finite: its step overflows; the model of round {round_ - 1} stays"
            ) from error
        buffers = reduce_buffers(self.config.round, collected, self.algorithm.weights(cohort))
        norms = _norms(snapshot.state, state, self.algorithm.exchanges[last].direction(snapshot.state, before))
        norms = replace(norms, left_out=_missing(cohort, taken.cohort))
        if not all(bool(torch.isfinite(tree.norm(part))) for part in (state.x, *state.memory.values())):
            raise Diverged(
                f"the model of round {round_} is not finite; the model of round {round_ - 1} stays. Lower the learning "
                "rate, or set round.max_update_norm"
            )
        return Snapshot(round_, state, buffers), norms

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
            fl.load_state(self._model, fl.ModelState(snapshot.state.x, snapshot.buffers, self.frozen))
            return evaluate(self._task, self._model, self.held_out, self.config.evaluation.batch_size)


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


def _missing(cohort: Sequence[fl.UpdateInfo], taken: Sequence[fl.UpdateInfo]) -> tuple[str, ...]:
    ids = {info.client_id for info in taken}
    return tuple(info.client_id for info in cohort if info.client_id not in ids)


def _norms(before: fl.ServerState, after: fl.ServerState, direction: fl.Tensors | None) -> StepNorms:
    movement = tree.subtract(after.x, before.x)
    length = float(tree.norm(movement))
    if direction is None:
        return StepNorms(length, 0.0, 0.0)
    size = float(tree.norm(direction))
    product = sum(float((movement[name].double() * -direction[name].double()).sum()) for name in movement)
    return StepNorms(length, size, product / (length * size) if length and size else 0.0)
