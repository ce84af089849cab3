"""The batched engine: many clients in lockstep as one model with a leading client dimension, on a CPU or a GPU.

Clients with the same exchange form groups, those with the most examples first. A group's updates are those of the
sequential engine up to the rounding of sums (algorithms.batched), and go the same way: the coordinator's admission and
sums. They stay in the device's memory for that; those that do not fit become files. If the work of a
group fails, its clients work one after the other, so that an error is reported of the client that has it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from algorithms.base import ClientUpdate
from algorithms.batched.batches import NotBatched, check_work
from algorithms.batched.captured import Captured
from algorithms.batched.choice import Choice, bytes_of_client, choose
from algorithms.batched.client import answer_together
from algorithms.batched.local import Member
from algorithms.batched.modules import RandomStream
from algorithms.batched.stacked import stack
from algorithms.batched.strategies import Name
from algorithms.outside_code import is_interrupt
from fl_client.errors import WorkFailed
from fl_client.training.data import LocalTask
from fl_client.training.payloads import (
    PlacedPayload,
    check_finite,
    check_finite_metrics,
    encoding_of,
    header_of,
    laid_out,
)
from fl_client.training.results import PreparedWork, next_state_of
from fl_ops.simulate.engines.client_work import CPU, Assigned, ClientWork, one_thread
from fl_ops.simulate.engines.engine import Bundles, EngineContext, Evaluated, Failed, LocalEngine, Trained
from fl_ops.simulate.engines.held import NO_DIGEST, DeviceMemory, TrainedTogether
from fl_tasks.batches import seed_everything
from protos.encodings import PLAIN
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment

CPU_BYTES = 1 << 30
"""Memory of a group on a CPU."""
GPU_SHARE = 0.5
"""Of the free memory of a GPU."""
MOST_CLIENTS = 64
"""In one group: from some size on, larger groups are not faster."""


@dataclass(frozen=True, slots=True)
class BatchedOptions:
    """How clients work in lockstep."""

    device: torch.device = CPU
    strategy: Name | None = None
    """None: the fastest one, measured with the first group."""
    group: int = 0
    """Clients of a group. 0: as many as memory allows, at most MOST_CLIENTS."""
    autocast: Literal["bfloat16"] | None = None
    """The precision of products in forward and backward passes, by torch.autocast. None: that of the parameters."""
    captures: bool = False
    """On CUDA, passes are recorded as graphs where that is possible."""
    holds_updates: bool = True
    """Updates stay in the device's memory until they are summed there. False: they become files."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A client whose values are loaded."""

    assigned: Assigned
    work: PreparedWork


class BatchedEngine(LocalEngine):
    """See `LocalEngine`. The same groups on the same device and build give the same bits."""

    def __init__(self, context: EngineContext, options: BatchedOptions) -> None:
        """Raises TaskError if the task's model cannot be made."""
        if options.device.type != "cpu":
            context = replace(context, clients=_OnDevice(context.clients, options.device))
        self._context, self._options = context, options
        self._work = ClientWork(context, options.device, options.autocast or "float32")
        self._bundles: Bundles = {}
        self._choice: Choice | None = None
        self._captured: Captured | None = None
        self._group = options.group
        self._alone = self._in_files = 0
        self._memory = DeviceMemory(options.device) if options.holds_updates else None

    @property
    def report(self) -> str:
        """See `LocalEngine.report`: the strategy, and the size of groups."""
        if self._choice is None:
            return ""
        alone = f"; one after the other, after an error in their group: {self._alone} clients" if self._alone else ""
        device = self._options.device
        files = f"; written to files, as {device} has no room for them: {self._in_files} updates"
        files = files if self._in_files and self._memory is not None else ""
        graphs = "" if self._captured is None else f"; {self._captured}"
        return f"lockstep in groups of at most {self._group} clients: {self._choice}{graphs}{alone}{files}"

    def begin(self, bundles: Bundles) -> None:
        """See `LocalEngine.begin`."""
        self._bundles = bundles

    def train(
        self, common: Assignment, clients: Sequence[str], seeds: Sequence[int]
    ) -> Iterator[Trained | TrainedTogether | Failed]:
        """See `LocalEngine.train`. A group works when its first result is fetched.

        Raises:
            NotBatched: the run's work is possible only for one client after the other.
        """
        # By size, so that the clients of a group have about as many steps; by id, so that arrival changes no group.
        order = sorted(
            zip(clients, seeds, strict=True), key=lambda one: (-self._context.size_of(one[0]), one[0].encode())
        )
        while order:
            size = self._group_size(common, order[0])
            yield from self._train_group(common, order[:size])
            order = order[size:]

    def evaluate(self, common: EvaluationAssignment, clients: Sequence[str]) -> Iterator[Evaluated | Failed]:
        """See `LocalEngine.evaluate`. One client after the other, on the device."""
        for client in clients:
            yield self._work.evaluate(common, client, self._bundles)

    def _train_group(
        self, common: Assignment, group: Sequence[tuple[str, int]]
    ) -> Iterator[Trained | TrainedTogether | Failed]:
        ready: list[_Ready] = []
        for client, seed in group:
            assigned = self._work.assigned(common, client, seed)
            try:
                ready.append(_Ready(assigned, assigned.prepare(self._bundles)))
            except WorkFailed as error:
                yield Failed.of(client, error)
        if not ready:
            return
        started = time.monotonic()
        try:
            with one_thread():
                updates = self._answers(common, ready)
        except NotBatched:
            raise
        except (MemoryError, torch.OutOfMemoryError):
            yield from self._smaller(common, group)
            return
        except BaseException as error:  # an error of one client's data or of the task's code, of any type
            if is_interrupt(error):
                raise
            self._alone += len(ready)
            for each in ready:
                seed = each.assigned.assignment.training.seed
                yield self._work.train(common, each.assigned.client, seed, self._bundles)
            return
        seconds = (time.monotonic() - started) / len(ready)
        with one_thread():
            yield from [*self._delivered_together(ready, updates, seconds)]

    def _smaller(
        self, common: Assignment, group: Sequence[tuple[str, int]]
    ) -> Iterator[Trained | TrainedTogether | Failed]:
        """The group in halves, now and in later exchanges; one client alone reports what it lacks."""
        if len(group) == 1:
            yield self._work.train(common, *group[0], self._bundles)
            return
        self._group = -(-len(group) // 2)
        yield from self._train_group(common, group[: self._group])
        yield from self._train_group(common, group[self._group :])

    def _delivered_together(
        self, ready: Sequence[_Ready], updates: Sequence[ClientUpdate], seconds: float
    ) -> Iterator[Trained | TrainedTogether | Failed]:
        """The results of a group. Updates stay in the device's memory if they fit, else they become files."""
        assignment = ready[0].assigned.assignment
        # Values that are held are those that the coordinator adds, so updates with an encoding become files.
        held = (
            None if self._memory is None or encoding_of(assignment) != PLAIN else self._memory.hold(_stacked(updates))
        )
        if held is None:
            self._in_files += len(ready)
        counted: list[int] = []
        for number, (each, update) in enumerate(zip(ready, updates, strict=True)):
            assigned, work = each.assigned, each.work
            try:
                if held is None:
                    trained = assigned.trainer.finish(assigned.assignment, work, update, seconds)
                    yield self._work.deliver(assigned, trained)
                    continue
                if held.is_finite(number):
                    check_finite_metrics(update)
                else:
                    check_finite(update, work.buffers)
            except WorkFailed as error:
                yield Failed.of(assigned.client, error)
                continue
            if (next_state := next_state_of(work, update)) is not None:
                self._context.states.put_next(assigned.client, next_state)
            counted.append(number)
        if held is not None and counted:
            done, trainers = [updates[number] for number in counted], [ready[i].assigned.trainer for i in counted]
            common = header_of(assignment, replace(done[0], loss=None, epochs=()), laid_out(done[0]), NO_DIGEST)
            yield TrainedTogether(
                [ready[number].assigned.client for number in counted],
                common,
                [update.steps for update in done],
                [trainer.examples for trainer in trainers],
                [update.loss for update in done],
                [update.epochs for update in done],
                seconds,
                held if len(counted) == len(ready) else held.only(counted),
                [trainer.own_batches for trainer in trainers],
            )

    def _answers(self, common: Assignment, ready: Sequence[_Ready]) -> list[ClientUpdate]:
        model, device = ready[0].work.model, self._options.device
        if self._choice is None:
            self._choice = self._chosen(common, ready)
            if self._options.captures and self._choice.name != "one_by_one":
                self._captured = Captured(self._choice.strategy)
        members = []
        for each in ready:
            seed_everything(each.assigned.assignment.training.seed)
            members.append(Member(each.work.data, each.work.work, RandomStream(device)))
        return answer_together(model, members, self._captured or self._choice.strategy)

    def _chosen(self, common: Assignment, ready: Sequence[_Ready]) -> Choice:
        """The strategy, measured with the clients' first batches."""
        batches = []
        for each in ready:
            check_work(each.work.data, each.work.work)
            batches.append(self._first_batch(common, each.assigned.client))
        return choose(ready[0].work.model, ready[0].work.data, batches, self._clock, self._options.strategy)

    def _first_batch(self, common: Assignment, client: str) -> object:
        """A batch of a client, of work of its own: reading it takes nothing from the client's batches."""
        seed_everything(0)
        data = self._work.assigned(common, client, 0).prepare(self._bundles).data
        return next(iter(data.complete))

    def _group_size(self, common: Assignment, first: tuple[str, int]) -> int:
        """Clients of a group, by the memory that the first one needs."""
        if self._group:
            return self._group
        device = self._options.device
        try:
            ready = self._work.assigned(common, *first).prepare(self._bundles)
            with one_thread():
                client_bytes = bytes_of_client(ready.model, ready.data, next(iter(ready.data.complete)))
        except BaseException as error:  # it is reported when the client trains
            if is_interrupt(error):
                raise
            return 1
        free = CPU_BYTES if device.type == "cpu" else GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        self._group = max(1, min(MOST_CLIENTS, int(free // client_bytes)))
        return self._group

    def _clock(self) -> float:
        if self._options.device.type == "cuda":
            torch.cuda.synchronize(self._options.device)
        return time.perf_counter()


def _stacked(updates: Sequence[ClientUpdate]) -> list[PlacedPayload]:
    """The payloads of all updates, with tensors [clients, ...]."""
    parts = [laid_out(update) for update in updates]
    return [
        first._replace(tensors=stack([part[number].tensors for part in parts])) for number, first in enumerate(parts[0])
    ]


class _OnDevice(Mapping[str, LocalTask]):
    """Clients whose data is on a device. It stays there after the client's first work."""

    def __init__(self, clients: Mapping[str, LocalTask], device: torch.device) -> None:
        self._clients, self._device = clients, device
        self._moved: dict[str, LocalTask] = {}

    def __getitem__(self, client: str) -> LocalTask:
        if client not in self._moved:
            local = self._clients[client]
            train, held_out = local.train.to(self._device), local.held_out.to(self._device)
            self._moved[client] = replace(local, train=train, held_out=held_out, device=self._device)
        return self._moved[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)
