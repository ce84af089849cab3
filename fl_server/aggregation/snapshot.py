"""A model of a run with the server's state: everything that passes from round to round; and its evaluation."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import algorithms as fl
from algorithms import tree
from algorithms.averaging import Averaging
from algorithms.precision import master_dtype
from fl_server.aggregation.evaluation import EvaluatedModel
from fl_server.aggregation.outside_task.remote_task import RemoteModel, RemoteTask
from fl_server.aggregation.task_model import CPU, TaskModel, blank, laid_out, master_layout, other_frozen
from fl_server.rounds.metrics import as_averaged
from fl_server.run_settings.config import AveragingSection, RunConfig
from fl_server.store.checkpoint_files import AveragedModel
from fl_server.store.checkpoints import FROZEN, Checkpoint
from fl_tasks import Task, TaskError
from fl_tasks.evaluation import BatchSums
from protos.codec import Layout, digest_of, pieces_of
from protos.digests import digest_text
from protos.frozen import frozen_text

_CLIP = "clip"
"""The fact of a checkpoint that is `Snapshot.clip`."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed model, or the first one."""

    round: int
    """The round that made it; -1 for the first model."""
    state: fl.ServerState
    buffers: fl.Tensors
    rounded: fl.Tensors = field(default_factory=dict)
    """The parameters of a lower precision than the state's, in the model's dtypes."""

    norm: float = 0.0
    """L2 norm of the trainable parameters."""
    averaged: AveragedModel | None = None
    """The mean of the committed models, if the run has one after this round."""
    clip: float = 0.0
    """C of the next round in a run with client-level privacy."""

    @property
    def parameters(self) -> fl.Tensors:
        """The trainable parameters in the model's dtypes: what clients are sent, what is evaluated and exported."""
        return {**self.state.x, **self.rounded}

    @property
    def sent(self) -> fl.Tensors:
        """What clients are sent of the model, and what is averaged: the parameters and the buffers."""
        return {**self.parameters, **self.buffers}

    def measured(self) -> Snapshot:
        """The snapshot with its norm."""
        return replace(self, norm=float(tree.norm(self.state.x))) if self.state.x else self

    def averaged_in(self, folder: Path) -> Snapshot:
        """The snapshot whose averaged model, if there is one, has its sums in this folder."""
        if self.averaged is None:
            return self
        return replace(self, averaged=replace(self.averaged, sums=folder, before=None))

    def with_average(self, section: AveragingSection | None, before: AveragedModel | None) -> Snapshot:
        """A new model with the average of all up to it, whose sums are written with its checkpoint.

        before: the average after the round before.
        """
        if section is None:
            return self
        rule = Averaging(section.method, section.decay or 0.0, section.start or 0, section.window or 0)
        if rule.mean(self.round) is None:
            return self
        sums = None if before is None else before.sums
        return replace(self, averaged=AveragedModel(rule, self.round, self.sent, before=sums))

    def of_average(self) -> Snapshot | None:
        """The averaged model in the form of a snapshot, to be evaluated; None if there is none. It has no memory.

        Its floating buffers, such as the statistics of batch normalisation, are means too, which is an approximation:
        the averaged parameters have other statistics.
        """
        if self.averaged is None:
            return None
        values = self.averaged.values()
        x = {name: values[name] for name in self.parameters}
        return Snapshot(self.round, fl.ServerState(x, {}), {name: values[name] for name in self.buffers})


class Snapshots:
    """Lays out, saves and restores the snapshots of one run."""

    def __init__(self, model: TaskModel | RemoteModel, device: torch.device = CPU) -> None:
        """device: where the snapshots are."""
        self._layout, self._local_frozen, self._tied = model.layout, model.local_frozen, model.tied
        self.device, trainable = device, model.trainable_layout
        self.state_layout = master_layout(trainable)
        """The layout of the server's state."""
        self.low: Mapping[str, torch.dtype] = {
            entry.name: entry.dtype for entry in trainable.entries if entry.dtype != master_dtype(entry.dtype)
        }
        """The parameters of a lower precision than the state's."""
        self.frozen: fl.Tensors = {}
        """Frozen tensors of the first model, if they are sent; set with the first snapshot."""

    def first(self, start: fl.ModelState, state: fl.ServerState) -> Snapshot:
        """The snapshot before round 0, in memory of its own. state: of the values that training starts from."""
        self.frozen = self._new(start.frozen, Layout.of(start.frozen))
        return self._laid_out(Snapshot(-1, state, start.buffers))

    def blank_after(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot for the round after, whose memory is to be filled."""
        memory = {symbol: blank(self.state_layout, self.device) for symbol in snapshot.state.memory}
        master = {name: torch.empty_like(snapshot.state.x[name]) for name in self.low}
        return self._of(snapshot.round + 1, blank(self._layout, self.device), master, memory)

    def _new(self, tensors: fl.Tensors, layout: Layout) -> fl.Tensors:
        return laid_out(tensors, layout, self.device)

    def _laid_out(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot in memory of its own, in wire layout."""
        into = blank(self._layout, self.device)
        master = {name: snapshot.state.x[name].to(self.device, copy=True) for name in self.low}
        tree.copy_(into, {**snapshot.state.x, **snapshot.buffers})
        memory = {symbol: self._new(tensors, self.state_layout) for symbol, tensors in snapshot.state.memory.items()}
        return self._of(snapshot.round, into, master, memory).measured()

    def _of(self, round_: int, model: fl.Tensors, master: fl.Tensors, memory: fl.Memory) -> Snapshot:
        """model: all that is sent; master: the state's tensors for parameters of low precision."""
        x = {entry.name: model[entry.name] for entry in self._layout.entries if entry.trainable}
        buffers = {entry.name: model[entry.name] for entry in self._layout.entries if not entry.trainable}
        rounded = {name: model[name] for name in self.low}
        return Snapshot(round_, fl.ServerState({**x, **master}, memory, self.low), buffers, rounded)

    def checkpoint(self, snapshot: Snapshot, facts: Mapping[str, object]) -> Checkpoint:
        """The checkpoint of a snapshot, with tensors on the host."""
        model = tree.to({**snapshot.sent, **self.frozen}, CPU)
        master = tree.to({name: snapshot.state.x[name] for name in snapshot.rounded}, CPU)
        named = {FROZEN: frozen_text(self._local_frozen)} if self._local_frozen else {}
        memory = {symbol: tree.to(tensors, CPU) for symbol, tensors in snapshot.state.memory.items()}
        averaged = None if snapshot.averaged is None else replace(snapshot.averaged, model=tree.to(snapshot.sent, CPU))
        clip = {_CLIP: snapshot.clip} if snapshot.clip else {}
        return Checkpoint(model, memory, {**facts, **named, **clip}, self._tied, master, averaged)

    def restored(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot of a checkpoint. Raises TaskError if the task has other frozen parameters than the run."""
        if (named := checkpoint.facts.get(FROZEN, "")) != frozen_text(self._local_frozen):
            raise TaskError(other_frozen(named, frozen_text(self._local_frozen)))
        sent = {entry.name for entry in self._layout.entries}
        frozen = {name: tensor for name, tensor in checkpoint.model.items() if name not in sent}
        self.frozen = self._new(frozen, Layout.of(frozen))
        memory = {symbol: dict(tensors) for symbol, tensors in checkpoint.memory.items()}
        model, master = dict(checkpoint.model), dict(checkpoint.master)
        snapshot = self._laid_out(self._of(checkpoint.facts["round"], model, master, memory))
        snapshot = replace(snapshot, clip=checkpoint.facts.get(_CLIP, 0.0))
        if checkpoint.averaged is None:
            return snapshot
        return replace(snapshot, averaged=replace(checkpoint.averaged, model=snapshot.sent))

    def digest(self, snapshot: Snapshot) -> str:
        """Digest of the model as it is sent without an encoding."""
        return self._digest(snapshot.sent)

    def averaged_digest(self, snapshot: Snapshot) -> str | None:
        """Digest of the averaged model, as that of a committed one; None if there is none."""
        return None if snapshot.averaged is None else self._digest(snapshot.averaged.values())

    def _digest(self, model: fl.Tensors) -> str:
        return digest_text(digest_of(self._layout.table, pieces=pieces_of(model, self._layout)))


class RunModel:
    """The model of a run's task. Its memory is filled by one user at a time: with first values, and for evaluations."""

    def __init__(self, config: RunConfig, model: EvaluatedModel | RemoteModel, snapshots: Snapshots) -> None:
        self._config, self._model, self._snapshots = config, model, snapshots
        self._filling = threading.Lock()
        """Held while the model's memory is filled."""

    @contextmanager
    def first(self, path: str) -> Iterator[fl.ModelState]:
        """The values before round 0. Raises InvalidInput if the file of `initial_model` does not fit."""
        with self._filling, self._model.first(path) as values:
            yield values

    def release(self) -> None:
        """Give the memory of the first values back."""
        with self._filling:
            self._model.release()

    @property
    def in_process(self) -> EvaluatedModel:
        """The model of a task in this process."""
        if not isinstance(self._model, EvaluatedModel):
            raise TypeError("expected a task in this process, got one in a process of its own")
        return self._model

    def _values(self, snapshot: Snapshot) -> fl.ModelState:
        return fl.ModelState(snapshot.parameters, snapshot.buffers, self._snapshots.frozen)

    def whole(self, snapshot: Snapshot, *, estimate: bool = False) -> fl.Tensors:
        """The whole state_dict, with frozen parameters that checkpoints leave out. In memory of its own.

        estimate: with running statistics that are computed anew; for a task in this process.
        """
        with self._filling:
            return self.in_process.whole(self._values(snapshot), estimate=estimate)

    def leave_evaluation(self, why: str) -> None:
        """End the evaluation under way, at its next batch; a process of its own ends at once. Thread-safe."""
        self._model.leave(why)

    @property
    def estimates_statistics(self) -> bool:
        """Whether the running statistics of the averaged model are computed anew before it is evaluated."""
        return self._config.averaging is not None and self._config.averaging.statistics == "estimated"

    def evaluate_averaged(self, snapshot: Snapshot) -> dict[str, float]:
        """The same of the averaged model, under its names; empty if there is none. Raises as `evaluate`."""
        averaged = snapshot.of_average()
        if averaged is None:
            return {}
        return as_averaged(self.evaluate(averaged, estimate=self.estimates_statistics))

    def evaluate(self, snapshot: Snapshot, *, estimate: bool = False) -> dict[str, float]:
        """The task's metrics on the server's held-out examples, which are read once. One evaluation at a time.

        estimate: of the model with running statistics that are computed anew.
        Raises TaskError, and EvaluationLeft after `leave_evaluation`.
        """
        with self._filling:
            return self._model.evaluate(self._values(snapshot), estimate=estimate)

    def reported_metrics(self, snapshot: Snapshot) -> list[str] | None:
        """Names of the task's metrics, from one batch of the held-out examples; None if the server has no examples."""
        with self._filling:
            return self._model.names(self._values(snapshot))

    def evaluate_part(self, snapshot: Snapshot, first: int, last: int) -> list[BatchSums]:
        """The batches of an evaluation on the CPU from `first` up to `last`, in order."""
        with self._filling:
            return self.in_process.part(self._values(snapshot), first, last)


def model_of(
    config: RunConfig, task: Task | RemoteTask, device: torch.device, most: int
) -> EvaluatedModel | RemoteModel:
    """The model of a run's task. most: bytes of the tensors that building it takes; 0: any."""
    options: dict[str, Any] = {
        "seed": config.seed,
        "personal": config.personal,
        "own_frozen": config.task.frozen == "local",
        "max_bytes": most,
    }
    if isinstance(task, RemoteTask):
        return task.model(config.evaluation.batch_size, **options)
    return EvaluatedModel(task, device, config.evaluation.batch_size, **options)
