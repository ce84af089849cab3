"""The batched engine: many clients in lockstep as one model with a leading client dimension, on a CPU or a GPU.

Clients with the same exchange form groups, those with the most examples first. A group's updates are those of the
sequential engine up to the rounding of sums (algorithms.batched), and go the same way: the coordinator's admission and
sums. They stay in the device's memory for that; those that do not fit become files. If the work of a
group fails, its clients work one after the other, so that an error is reported of the client that has it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from algorithms import tree
from algorithms.batched.batches import NotBatched, Planned, StepBatches, stacked_batches
from algorithms.batched.choice import Choice, WrongStrategy, choose
from algorithms.batched.client import Updates, answer_together, next_states
from algorithms.batched.modules import CountedNumbers
from algorithms.batched.strategies import Name
from algorithms.batched.training import Training
from algorithms.batches import to_device
from algorithms.outside_code import is_interrupt
from fl_client.errors import WorkFailed
from fl_client.storage.client_state_store import NextState
from fl_client.training.payloads import check_finite, encoding_of, header_of, laid_out
from fl_common.units import counted
from fl_ops.simulate.engines.client_work import CPU, ClientWork, one_thread
from fl_ops.simulate.engines.engine import Client, Done, EngineContext, Failed, LocalEngine, Order, Trained
from fl_ops.simulate.engines.groups import Groups, GroupSizes, Ready
from fl_ops.simulate.engines.held import NO_DIGEST, DeviceMemory, TrainedTogether
from fl_ops.simulate.engines.pool import OnDevice, Pool
from fl_ops.simulate.run_files import mapped_next
from fl_tasks.batches import seed_everything
from protos.encodings import PLAIN
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment

LockstepPrecision = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class BatchedOptions:
    """How clients work in lockstep."""

    device: torch.device = CPU
    strategy: Name | None = None
    """None: the fastest one, measured with the first group."""
    group: int = 0
    """Clients of a group. 0: as many as memory allows, at most MOST_CLIENTS."""
    precision: LockstepPrecision = "float32"
    """The precision of products and convolutions in forward and backward passes. tf32: on CUDA, factors of 10 bits.
    bfloat16: by torch.autocast; the parameters stay float32."""
    holds_updates: bool = True
    """Updates stay in the device's memory until they are summed there. False: they become files."""


class BatchedEngine(LocalEngine):
    """See `LocalEngine`. The same groups on the same device and build give the same bits."""

    def __init__(self, context: EngineContext, options: BatchedOptions) -> None:
        """Raises TaskError if the task's model cannot be made."""
        if options.device.type == "cuda":  # by default torch has TF32 for convolutions, and not for products
            tf32 = options.precision == "tf32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        pool = Pool(context.clients, options.device)
        self._context, self._options = context, options
        if options.device.type != "cpu":
            context = replace(context, clients=OnDevice(context.clients, options.device))
        self._work = ClientWork(context, options.device, "bfloat16" if options.precision == "bfloat16" else "float32")
        self._choice: Choice | None = None
        self._training: Training | None = None
        self._by_client = ""
        self._groups = Groups(context, self._work, options.device, pool)
        self._sizes = GroupSizes(self._work, options.device, options.group)
        self._alone: Counter[str] = Counter()
        """Clients that trained one after the other, by reason."""
        self._in_files = 0
        self._memory = DeviceMemory(options.device) if options.holds_updates else None

    @property
    def report(self) -> str:
        """See `LocalEngine.report`: the strategy, the size of groups, and what is not done in lockstep."""
        parts = [
            f"{counted(count, 'client')} trained one after the other ({why})" for why, count in self._alone.items()
        ]
        if self._in_files and self._memory is not None:
            device = self._options.device
            parts.append(f"written to files, as {device} has no room for them: {counted(self._in_files, 'update')}")
        if self._by_client:
            parts.insert(0, f"the method's code runs client by client ({self._by_client})")
        if self._choice is not None:
            parts[:0] = [
                f"groups of at most {counted(self._sizes.most, 'client')}: {self._choice}",
                str(self._training),
            ]
        return "lockstep: " + "; ".join(parts) if parts else ""

    def work(self, order: Order) -> Iterator[Done]:
        """See `LocalEngine.work`. A group works when its first result is fetched. Evaluations are not in lockstep.

        Raises:
            WrongStrategy: the wanted strategy cannot compute the model.
        """
        common = order.common
        if isinstance(common, EvaluationAssignment):
            for client in order.clients:
                yield self._work.done(order, client, self.bundles)
            return
        private = common.training.HasField("privacy")
        why = "private steps clip each example" if private else ""
        why = why or (common.training.continue_data and "each reads its examples on from its own place") or ""
        why = why or (common.rounding and "its state is made of rounded numbers")
        if why:
            yield from self._one_by_one(common, order.clients, why)
            return
        # By size, so that the clients of a group have about as many steps; by id, so that arrival changes no group.
        left = sorted(order.clients, key=lambda one: (-self._context.size_of(one[0]), one[0].encode()))
        while left:
            size = self._sizes.of(common, left[0], self.bundles)
            yield from self._train_group(common, left[:size])
            left = left[size:]

    def _train_group(self, common: Assignment, group: Sequence[Client]) -> Iterator[Trained | TrainedTogether | Failed]:
        started = time.monotonic()
        try:
            with one_thread():
                ready, failures = self._groups.ready(common, group, self.bundles)
                updates = None if ready is None else self._answers(common, ready)
        except WrongStrategy:
            raise
        except NotBatched as error:
            yield from self._one_by_one(common, group, str(error))
            return
        except (MemoryError, torch.OutOfMemoryError):
            yield from self._smaller(common, group)
            return
        except BaseException as error:  # an error of one client's data or of the task's code, of any type
            if is_interrupt(error):
                raise
            yield from self._one_by_one(common, group, "an error in their group")
            return
        yield from failures
        if ready is not None and updates is not None:
            seconds = (time.monotonic() - started) / len(ready.clients)
            with one_thread():
                results = [*self._delivered(common, ready, updates, seconds)]
            yield from results

    def _one_by_one(self, common: Assignment, group: Sequence[Client], why: str) -> Iterator[Trained | Failed]:
        self._alone[why] += len(group)
        for client, seed in group:
            yield self._work.train(common, client, seed, self.bundles)

    def _smaller(self, common: Assignment, group: Sequence[Client]) -> Iterator[Trained | TrainedTogether | Failed]:
        """The group in halves, now and in later exchanges; one client alone reports what it lacks."""
        if len(group) == 1:
            yield self._work.train(common, *group[0], self.bundles)
            return
        if self._training is not None:
            self._training.forget()
        half = self._sizes.halve(len(group))
        yield from self._train_group(common, group[:half])
        yield from self._train_group(common, group[half:])

    def _delivered(
        self, common: Assignment, ready: Ready, updates: Updates, seconds: float
    ) -> Iterator[Trained | TrainedTogether | Failed]:
        """The results of a group. Updates stay in the device's memory if they fit, else they become files."""
        # Values that are held are those that the coordinator adds, so updates that are encoded or clipped become files.
        holds = self._memory is not None and encoding_of(common) == PLAIN and not common.clip
        first = updates.of_client(0)
        payloads = [
            part._replace(
                tensors={**updates.payloads[part.payload], **(updates.buffers if part.payload == "delta" else {})}
            )
            for part in laid_out(first)
        ]
        held = self._memory.hold(payloads) if holds and self._memory is not None else None
        if held is None:
            yield from self._in_files_each(common, ready, updates, seconds)
            return
        values = np.asarray(held.squares, np.float64).sum(axis=1) + np.array([loss or 0.0 for loss in updates.losses])
        counted = [*range(len(ready.clients))]
        for number in np.flatnonzero(~np.isfinite(values)).tolist():
            try:
                check_finite(updates.of_client(number), ready.work.buffers)
            except WorkFailed as error:
                counted.remove(number)
                yield Failed.of(ready.clients[number][0], error)
        if not counted:
            return
        self._put_next(ready, updates, counted)
        header = header_of(ready.assignment, replace(first, loss=None, epochs=()), payloads, NO_DIGEST)
        yield TrainedTogether(
            [ready.clients[number][0] for number in counted],
            header,
            [updates.steps[number] for number in counted],
            [ready.examples[number] for number in counted],
            [updates.losses[number] for number in counted],
            [updates.epochs[number] for number in counted],
            held if len(counted) == len(ready.clients) else held.only(counted),
            [ready.own_batches[number] for number in counted],
        )

    def _in_files_each(
        self, common: Assignment, ready: Ready, updates: Updates, seconds: float
    ) -> Iterator[Trained | Failed]:
        self._in_files += len(ready.clients)
        for number, (client, _) in enumerate(ready.clients):
            assigned, work = self._groups.prepared(common, ready, number)
            try:
                trained = assigned.trainer.finish(assigned.assignment, work, updates.of_client(number), seconds)
            except WorkFailed as error:
                yield Failed.of(client, error)
            else:
                yield self._work.deliver(assigned, trained)

    def _put_next(self, ready: Ready, updates: Updates, counted: Sequence[int]) -> None:
        """Keep the next states of clients whose updates are finite, if the method has states after this exchange."""
        work = ready.work.work
        if not (work.algorithm.keeps_client_state and work.algorithm.exchanges[work.exchange].trains):
            return
        states = next_states(ready.members, updates)
        if isinstance(states, list):
            for number in counted:
                self._context.states.put_next(ready.clients[number][0], NextState.of_both(*states[number]))
            return
        both = NextState.of_both(*states)
        if len(counted) < len(ready.clients):
            both = mapped_next(both, lambda it: tree.rows_of(it, [*counted]))
        self._context.states.put_next_group([ready.clients[number][0] for number in counted], both)

    def _answers(self, common: Assignment, ready: Ready) -> Updates:
        if self._choice is None or self._training is None:
            self._choice = self._chosen(common, ready)
            masks = self._options.device.type == "cuda"
            self._training = Training(self._choice.strategy, self._choice.facts, time.thread_time, masks=masks)
        members, device = ready.members, self._options.device
        # A pass of one client alone draws from torch's generators.
        alone = self._choice.name != "grouped"
        if device.type == "cuda" and not (alone and self._choice.facts.draws):
            planned = members.batches
            placed = planned.seeds if isinstance(planned, Planned) else None
            numbers = CountedNumbers.of_seeds([seed for _, seed in ready.clients], device, placed)
            members = replace(members, numbers=numbers)
        updates = answer_together(ready.work.model, members, self._training)
        self._by_client = members.contexts.alone
        self._sizes.fit_recorded(self._training.client_bytes, len(ready.clients))
        return updates

    def _chosen(self, common: Assignment, ready: Ready) -> Choice:
        """The strategy, measured with the clients' first batches."""
        batches = self._first_batches(common, ready)
        return choose(ready.work.model, ready.work.data, batches, self._clock, self._options.strategy)

    def _first_batches(self, common: Assignment, ready: Ready) -> StepBatches:
        """The clients' first batches, which stay their first ones."""
        planned, clients = ready.members.batches, len(ready.clients)
        if isinstance(planned, Planned):
            mark = ready.members.numbers.mark()
            batches = planned.at(0, clients)
            ready.members.numbers.go_back(mark)
            return batches
        drawn = []
        for client, _ in ready.clients:
            seed_everything(0)
            drawn.append(next(iter(self._work.assigned(common, client, 0).prepare(self.bundles).data.complete)))
        return stacked_batches([to_device(batch, self._options.device) for batch in drawn])

    def _clock(self) -> float:
        if self._options.device.type == "cuda":
            torch.cuda.synchronize(self._options.device)
        return time.perf_counter()
