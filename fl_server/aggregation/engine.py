"""Computes a run: first model, server update, bundles for clients, evaluation. Blocking; called from worker threads.

A Snapshot holds everything that passes from round to round; the engine itself keeps only constants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import algorithms as fl
from algorithms import tree
from algorithms.averaging import Averaging
from algorithms.precision import master_dtype
from fl_server.aggregation.blocks import CPU, Source
from fl_server.aggregation.bundles import blank, laid_out, master_layout
from fl_server.aggregation.client_share import capped, left_out, lighter
from fl_server.aggregation.encoded_update import Decoding, opened
from fl_server.aggregation.evaluation import ServerEvaluation
from fl_server.aggregation.mean import SumUpdates, sum_updates
from fl_server.aggregation.methods import (
    algorithm_in,
    build_algorithm,
    check_own_loop,
    learning_rate_in,
    rate_schedule,
)
from fl_server.aggregation.outside_task.remote_task import RemoteModel, RemoteTask
from fl_server.aggregation.reduction import Reduction, reduce_buffers, select_updates
from fl_server.aggregation.run_encodings import References, UpdateKeys, check_reference, update_encoding
from fl_server.aggregation.sending.exchange import ExchangeBundles, direction_of, dtype_names
from fl_server.aggregation.sending.outgoing import Outgoing, in_encoding
from fl_server.aggregation.server_update import ServerUpdateStats, apply_server_update, check_finite
from fl_server.aggregation.shapes import AcceptedUpdates, UpdateShape
from fl_server.aggregation.snapshot import Snapshot
from fl_server.aggregation.task_model import TaskModel, other_frozen
from fl_server.errors import InvalidInput
from fl_server.rounds.directions import as_averaged
from fl_server.run_config import RunConfig
from fl_server.store.averaged_model import AveragedModel
from fl_server.store.checkpoints import FROZEN, Checkpoint
from fl_server.store.files import file_digest
from fl_tasks import Task, TaskError
from fl_tasks.evaluation import BatchSums
from fl_tasks.own_loop import own_loop
from protos.codec import Layout, digest_of, pieces_of
from protos.digests import digest_text
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_AVERAGED
from protos.frozen import frozen_text

_NONE: Mapping[str, fl.Tensors] = MappingProxyType({})


def _measured(snapshot: Snapshot) -> Snapshot:
    """The snapshot with its norm."""
    x = snapshot.state.x
    return replace(snapshot, norm=float(tree.norm(x))) if x else snapshot


def _sent(snapshot: Snapshot) -> fl.Tensors:
    """What clients are sent of a model, and what is averaged."""
    return {**snapshot.parameters, **snapshot.buffers}


class Engine:
    """One run's task and algorithm."""

    def __init__(  # noqa: PLR0913 - two facts of a coordinator
        self,
        config: RunConfig,
        task: Task | RemoteTask,
        device: torch.device = CPU,
        max_model_bytes: int = 0,
        *,
        start: Path | None = None,
    ) -> None:
        """Updates are summed where they are, and the rest is done on the CPU.

        task: in this process, or in one of its own. device: for evaluations in this process. max_model_bytes: of the
        tensors that building the model takes; 0: any. start: the file whose digest is `initial_model`; None:
        `initial_model` is its path, as in a simulation.
        """
        self.config, self._start = config, start
        self.algorithm = build_algorithm(config)
        """With its parameters of round 0. What does not depend on the parameters is the same in all rounds."""
        self.sum_updates: SumUpdates = sum_updates
        """Another function here may share the sums among processes."""
        self.release: Callable[[], object] = lambda: None
        """As `Reduction.release`."""
        self.own_loop = task.facts.own_loop if isinstance(task, RemoteTask) else own_loop(task) is not None
        """Whether clients train with a loop of the task's own."""
        if self.own_loop:
            check_own_loop(config, self.algorithm)
        check_reference(config, self.algorithm, own_loop=self.own_loop)
        self._references = References(config)
        build: dict[str, Any] = {
            "seed": config.seed,
            "personal": config.personal,
            "own_frozen": config.task.frozen == "local",
            "max_bytes": max_model_bytes,
        }
        self._model: TaskModel | RemoteModel
        if isinstance(task, RemoteTask):
            self._model = task.model(config.evaluation.batch_size, **build)
        else:
            self._model = TaskModel(task, **build)
            self._evaluation = ServerEvaluation(task, device, config.evaluation.batch_size)
        self.layout, self._trainable_layout = self._model.layout, self._model.trainable_layout
        self._state_layout = master_layout(self._trainable_layout)
        self._low = {
            entry.name: entry.dtype
            for entry in self._trainable_layout.entries
            if entry.dtype != master_dtype(entry.dtype)
        }
        self._shapes = [
            UpdateShape.of(
                exchange.payloads,
                self.layout,
                self._trainable_layout,
                {payload: self._state_layout for payload, rule in exchange.computed.items() if rule.wide},
            ).encoded_as(update_encoding(config))
            for exchange in self.algorithm.exchanges
        ]
        self.frozen: fl.Tensors = {}
        """Frozen tensors of the first model, if they are sent; set with the first snapshot."""
        self.local_frozen = self._model.local_frozen
        """The frozen parameters that clients must have from their own tasks. None if they are sent."""
        self.remarks = self._model.remarks
        """What the creator of the run should know of its model, as lines of text."""
        self._evaluating = threading.Lock()

    def first(self) -> Snapshot:
        """The state before round 0. Raises InvalidInput if the file of `initial_model` does not fit."""
        with self._evaluating, self._model.first(self._start_file()) as start:
            self.frozen = laid_out(start.frozen, Layout.of(start.frozen))
            snapshot = self._laid_out(Snapshot(-1, self.algorithm.init(start.trainable), start.buffers))
            del start  # with it goes its memory, when the block ends
        return snapshot

    def _start_file(self) -> str:
        """The path of the run's initial model; empty for none. Raises InvalidInput if it is not the run's file."""
        wanted = self.config.initial_model
        if not wanted or self._start is None:
            return wanted
        if (got := digest_text(file_digest(self._start))) != wanted:
            raise InvalidInput("initial_model", f"the file with the digest {wanted}", got)
        return str(self._start)

    def _laid_out(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot in memory of its own, in wire layout."""
        into, master = blank(self.layout), {name: snapshot.state.x[name].clone() for name in self._low}
        tree.copy_(into, {**snapshot.state.x, **snapshot.buffers})
        memory = {symbol: laid_out(each, self._state_layout) for symbol, each in snapshot.state.memory.items()}
        return _measured(self._snapshot(snapshot.round, into, master, memory))

    def _snapshot(self, round_: int, model: fl.Tensors, master: fl.Tensors, memory: fl.Memory) -> Snapshot:
        """model: all that is sent; master: the state's tensors for parameters of low precision."""
        x = {entry.name: model[entry.name] for entry in self.layout.entries if entry.trainable}
        buffers = {entry.name: model[entry.name] for entry in self.layout.entries if not entry.trainable}
        rounded = {name: model[name] for name in self._low}
        return Snapshot(round_, fl.ServerState({**x, **master}, memory, self._low), buffers, rounded)

    def to_checkpoint(self, snapshot: Snapshot, facts: dict[str, object]) -> Checkpoint:
        """The checkpoint of a snapshot."""
        model = {**snapshot.parameters, **snapshot.buffers, **self.frozen}
        master = {name: snapshot.state.x[name] for name in snapshot.rounded}
        named = {FROZEN: frozen_text(self.local_frozen)} if self.local_frozen else {}
        memory = snapshot.state.memory
        return Checkpoint(model, memory, {**facts, **named}, self._model.tied, master, snapshot.averaged)

    def from_checkpoint(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot of a checkpoint. Raises TaskError if the task has other frozen parameters than the run."""
        if (named := checkpoint.facts.get(FROZEN, "")) != frozen_text(self.local_frozen):
            raise TaskError(other_frozen(named, frozen_text(self.local_frozen)))
        with self._evaluating:
            self._model.release()
        sent = {entry.name for entry in self.layout.entries}
        frozen = {name: tensor for name, tensor in checkpoint.model.items() if name not in sent}
        self.frozen = laid_out(frozen, Layout.of(frozen))
        memory = {symbol: dict(tensors) for symbol, tensors in checkpoint.memory.items()}
        state = self._snapshot(checkpoint.facts["round"], dict(checkpoint.model), dict(checkpoint.master), memory)
        snapshot = self._laid_out(state)
        if checkpoint.averaged is None:
            return snapshot
        return replace(snapshot, averaged=replace(checkpoint.averaged, model=_sent(snapshot)))

    def _with_average(self, made: Snapshot, before: AveragedModel | None) -> Snapshot:
        """A new model with the average of all up to it, whose sums are written with its checkpoint."""
        section = self.config.averaging
        if section is None:
            return made
        rule = Averaging(section.method, section.decay or 0.0, section.start or 0, section.window or 0)
        if rule.mean(made.round) is None:
            return made
        folder = None if before is None else before.folder
        return replace(made, averaged=AveragedModel(rule, made.round, _sent(made), before=folder))

    def averaged(self, snapshot: Snapshot) -> Snapshot | None:
        """The averaged model in the form of a snapshot, to be evaluated; None if there is none. It has no memory.

        Its floating buffers, such as the statistics of batch normalisation, are means too, which is an approximation:
        the averaged parameters have other statistics.
        """
        if snapshot.averaged is None:
            return None
        values = snapshot.averaged.values()
        x = {name: values[name] for name in snapshot.parameters}
        return Snapshot(snapshot.round, fl.ServerState(x, {}), {name: values[name] for name in snapshot.buffers})

    def averaged_for_clients(self, snapshot: Snapshot) -> Outgoing | None:
        """The averaged model as clients get it to evaluate it; None if there is none."""
        if snapshot.averaged is None:
            return None
        outgoing = Outgoing(RESOURCE_KIND_AVERAGED, snapshot.averaged.values(), self.layout)
        return in_encoding(outgoing, self.config, snapshot.round + 1)

    def averaged_digest(self, snapshot: Snapshot) -> str | None:
        """Digest of the averaged model, as that of a committed one; None if there is none."""
        if snapshot.averaged is None:
            return None
        return digest_text(digest_of(self.layout.table, pieces=pieces_of(snapshot.averaged.values(), self.layout)))

    def shape(self, exchange: int) -> UpdateShape:
        """The payloads of an exchange's update."""
        return self._shapes[exchange]

    def outgoing(self, snapshot: Snapshot, exchange: int = 0, sums: Mapping[str, fl.Tensors] = _NONE) -> list[Outgoing]:
        """The bundles for the clients of an exchange: model; direction, optimizer's state and frozen parts if any.

        Args:
            snapshot: of the round before.
            exchange: of the round under way.
            sums: of the round's earlier exchanges.
        """
        outgoing = self._bundles(snapshot).outgoing(snapshot, exchange, sums)
        if self.config.encodings.reference != "none":
            received = direction_of(outgoing)
            self._references.prepare(self._algorithm_after(snapshot), snapshot.round + 1, exchange, received)
        return outgoing

    def _bundles(self, snapshot: Snapshot) -> ExchangeBundles:
        algorithm = self._algorithm_after(snapshot)
        return ExchangeBundles(self.config, algorithm, self.layout, self._trainable_layout, self.frozen)

    def reduce(
        self, snapshot: Snapshot, exchange: int, cohort: Sequence[fl.UpdateInfo], sources: Sequence[Source]
    ) -> dict[str, fl.Tensors]:
        """The method's sums over an exchange's accepted updates, with the run's reducer in place of the mean.

        cohort and sources are in the order of client id bytes. Raises Diverged.
        """
        updates = self._accepted(snapshot, exchange, cohort, sources)
        sums = self._reduction(snapshot, exchange, updates).sums()
        for symbol, tensors in sums.items():
            check_finite(f"the sum {symbol}", tensors, snapshot.round + 1)
        self._bundles(snapshot).check(snapshot, exchange + 1, sums)
        return sums

    def server_update(
        self,
        snapshot: Snapshot,
        cohort: Sequence[fl.UpdateInfo],
        sources: Sequence[Source],
        earlier_sums: Mapping[str, fl.Tensors] = _NONE,
    ) -> tuple[Snapshot, ServerUpdateStats]:
        """Reduce the last exchange and apply the server half; returns the next snapshot. Raises Diverged.

        earlier_sums: of the round's earlier exchanges.
        """
        last = len(self.algorithm.exchanges) - 1
        accepted = self._accepted(snapshot, last, cohort, sources)
        weights = self.algorithm.weights(accepted.cohort)
        selected = select_updates(self.config.round, accepted, weights)
        memory = {symbol: blank(self._state_layout) for symbol in snapshot.state.memory}
        master = {name: torch.empty_like(snapshot.state.x[name]) for name in self._low}
        made = self._snapshot(snapshot.round + 1, blank(self.layout), master, memory)
        given = {**earlier_sums, **self._bundles(snapshot).received_direction(snapshot, last, earlier_sums)}
        reduction = replace(self._reduction(snapshot, last, selected), earlier_sums=given)
        stats = apply_server_update(reduction, snapshot.state, made.state, self._trainable_layout)
        if self._low:
            tree.copy_(made.rounded, made.state.x)
            check_finite(f"the model as {dtype_names(self._low)}", made.rounded, made.round)
        if made.buffers:
            tree.copy_(made.buffers, reduce_buffers(self.config.round, accepted, weights))
        self._bundles(made).check(made, 0, _NONE)
        return self._with_average(_measured(made), snapshot.averaged), replace(
            stats,
            left_out=left_out(accepted.cohort, selected.cohort),
            capped=lighter(cohort, self.algorithm.weights(cohort), weights),
            largest=max(zip(weights, (info.client_id for info in accepted.cohort), strict=True))[::-1],
        )

    def _accepted(
        self, snapshot: Snapshot, exchange: int, cohort: Sequence[fl.UpdateInfo], sources: Sequence[Source]
    ) -> AcceptedUpdates:
        """The updates of an exchange, whose values can be read."""

        def decoding(number: int) -> Decoding:
            return self.decoding(snapshot.round + 1, exchange, cohort[number].client_id, cohort[number].num_steps)

        shape = self.shape(exchange)
        return AcceptedUpdates(self._capped(cohort), opened(sources, shape, decoding), shape)

    def decoding(self, round_: int, exchange: int, client: str, steps: int) -> Decoding:
        """What is needed to decode a client's update. steps: K_i."""
        keys = UpdateKeys.of(self.config, round_, exchange, client)
        return Decoding(keys, self._references.of_client(round_, exchange, steps))

    def _capped(self, cohort: Sequence[fl.UpdateInfo]) -> Sequence[fl.UpdateInfo]:
        """The cohort with weights cut to the run's largest share of the examples, if it has such a limit."""
        share = self.config.round.max_client_share
        return capped(cohort, share) if share and max(self.algorithm.weights(cohort)) > share else cohort

    def _reduction(self, snapshot: Snapshot, exchange: int, updates: AcceptedUpdates) -> Reduction:
        info = self._round_info(snapshot.round + 1, len(updates.cohort))
        algorithm = self._algorithm_after(snapshot)
        return Reduction(
            algorithm, exchange, self.config.round, info, updates, sum_updates=self.sum_updates, release=self.release
        )

    def _algorithm_after(self, snapshot: Snapshot) -> fl.Algorithm:
        """The method with its parameters of the round under way."""
        return algorithm_in(self.config, self.algorithm, snapshot.round + 1)

    def restart(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the server's part of the client states reset; the model stays."""
        return replace(snapshot, state=self.algorithm.restart(snapshot.state))

    def _round_info(self, round_: int, cohort_size: int) -> fl.RoundInfo:
        return fl.RoundInfo(
            round_,
            learning_rate_in(self.config, round_),
            previous_learning_rate=learning_rate_in(self.config, round_ - 1) if round_ else None,
            rounds=self.config.horizon,
            population=self.config.population or None,
            population_examples=self.config.population_examples or None,
            cohort_size=cohort_size,
            schedule=rate_schedule(self.config.local.schedule),
        )

    def whole_model(self, snapshot: Snapshot, *, estimate: bool = False) -> fl.Tensors:
        """The whole state_dict, with frozen parameters that checkpoints leave out. In memory of its own.

        estimate: with running statistics that are computed anew; for a task in this process.
        """
        with self._evaluating, self._filled(snapshot) as model:
            if estimate:
                self.evaluation.estimate(model)
            whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            del model
        return whole

    @property
    def evaluation(self) -> ServerEvaluation:
        """Evaluates the task's model; for a task in this process."""
        return self._evaluation

    def _filled(self, snapshot: Snapshot) -> AbstractContextManager[nn.Module]:
        if not isinstance(self._model, TaskModel):
            raise TypeError("expected a task in this process, got one in a process of its own")
        return self._model.filled(self._values(snapshot))

    def _values(self, snapshot: Snapshot) -> fl.ModelState:
        return fl.ModelState(snapshot.parameters, snapshot.buffers, self.frozen)

    def leave_evaluation(self, why: str) -> None:
        """End the evaluation under way, at its next batch; a process of its own ends at once. Thread-safe."""
        if isinstance(self._model, RemoteModel):
            self._model.leave(why)
        else:
            self._evaluation.left = why

    @property
    def estimates_statistics(self) -> bool:
        """Whether the running statistics of the averaged model are computed anew before it is evaluated."""
        return self.config.averaging is not None and self.config.averaging.statistics == "estimated"

    def evaluate_averaged(self, snapshot: Snapshot) -> dict[str, float]:
        """The same of the averaged model, under its names; empty if there is none. Raises as `evaluate`."""
        averaged = self.averaged(snapshot)
        if averaged is None:
            return {}
        return as_averaged(self.evaluate(averaged, estimate=self.estimates_statistics))

    def evaluate(self, snapshot: Snapshot, *, estimate: bool = False) -> dict[str, float]:
        """The task's metrics on the server's held-out examples, which are read once. One evaluation at a time.

        estimate: of the model with running statistics that are computed anew.
        Raises TaskError, and EvaluationLeft after `leave_evaluation`.
        """
        if isinstance(self._model, RemoteModel):
            with self._evaluating:
                return self._model.evaluate(self._values(snapshot), estimate=estimate)
        with self._evaluating, self._filled(snapshot) as model:
            metrics = self.evaluation.metrics(model, estimate=estimate)
            del model  # with it goes its memory, when the block ends
        return metrics

    def reported_metrics(self, snapshot: Snapshot) -> list[str] | None:
        """Names of the task's metrics, from one batch of the held-out examples; None if the server has no examples."""
        if isinstance(self._model, RemoteModel):
            with self._evaluating:
                return self._model.names(self._values(snapshot))
        with self._evaluating, self._filled(snapshot) as model:
            names = self.evaluation.names(model)
            del model
        return names

    def evaluate_part(self, snapshot: Snapshot, first: int, last: int) -> list[BatchSums]:
        """The batches of an evaluation on the CPU from `first` up to `last`, in order."""
        with self._evaluating, self._filled(snapshot) as model:
            sums = self.evaluation.part(model, first, last)
            del model
        return sums
