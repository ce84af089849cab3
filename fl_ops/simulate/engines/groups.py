"""Prepares the clients of a group: their work as the daemon's trainer prepares it, once for all where that is the same.

Clients whose examples are in one tensor differ in their seed, their examples and their state alone. So the first one's
work is prepared, and the others' is made from values. Other clients are prepared one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms import tree
from algorithms.batched.batches import Plan, Planned, check_work, drawn_ahead
from algorithms.batched.choice import bytes_of_client
from algorithms.batched.contexts import Contexts
from algorithms.batched.local import rates_by_step
from algorithms.batched.members import Members
from algorithms.batched.modules import OwnNumbers, RandomStream, signed
from algorithms.batched.schedules import rates_of_all
from algorithms.model_state import trainable_views
from algorithms.outside_code import is_interrupt
from fl_client.errors import WorkFailed
from fl_client.training.client_states import state_of
from fl_client.training.methods import omega_of, work_of
from fl_client.training.payloads import encoding_of
from fl_client.training.results import PreparedWork
from fl_ops.simulate.engines.client_work import Assigned, ClientWork, one_thread
from fl_ops.simulate.engines.engine import Bundles, Client, EngineContext, Failed
from fl_ops.simulate.engines.held import free_bytes
from fl_ops.simulate.engines.pool import Pool, Pooled
from fl_ops.simulate.run_files import mapped
from fl_tasks.batches import plan_batches
from protos.encodings import PLAIN
from protos.fl.v1.training_pb2 import Assignment


@dataclass(frozen=True, slots=True)
class Ready:
    """Clients whose work is prepared."""

    clients: Sequence[Client]
    members: Members
    assignment: Assignment
    """The assignment of the first one."""
    work: PreparedWork
    """So too; model and buffers are those of all."""
    examples: Sequence[int]
    own_batches: Sequence[int]
    prepared: Sequence[tuple[Assigned, PreparedWork]]
    """The work of each client, where they were prepared one after the other."""


class Groups:
    """Prepares groups of clients."""

    def __init__(self, context: EngineContext, work: ClientWork, device: torch.device, pool: Pool) -> None:
        self._context, self._work, self._device, self._pool = context, work, device, pool

    def ready(self, common: Assignment, group: Sequence[Client], bundles: Bundles) -> tuple[Ready | None, list[Failed]]:
        """The clients whose work could be prepared, the most steps first, and the failures of the others.

        Raises NotBatched: the run's work is possible only for one client after the other.
        """
        pooled = self._pool.of([client for client, _ in group]) if encoding_of(common) == PLAIN else None
        if pooled is not None:
            try:
                return self._planned(common, group, bundles, pooled), []
            except WorkFailed:
                pass  # it is reported of the clients that have it
        prepared: list[tuple[Client, Assigned, PreparedWork]] = []
        failures: list[Failed] = []
        for client, seed in group:
            assigned = self._work.assigned(common, client, seed)
            try:
                prepared.append(((client, seed), assigned, assigned.prepare(bundles)))
            except WorkFailed as error:
                failures.append(Failed.of(client, error))
        return self._drawn(sorted(prepared, key=lambda one: -one[2].data.steps)) if prepared else None, failures

    def prepared(self, common: Assignment, ready: Ready, number: int) -> tuple[Assigned, PreparedWork]:
        """The work of one client as if it had been prepared alone."""
        if ready.prepared:
            return ready.prepared[number]
        work = replace(ready.work.work, context=ready.members.contexts.of(number))
        return self._work.assigned(common, *ready.clients[number]), replace(ready.work, work=work)

    def _drawn(self, prepared: Sequence[tuple[Client, Assigned, PreparedWork]]) -> Ready:
        clients, assigned, works = zip(*prepared, strict=True)
        streams = [RandomStream(self._device, seed) for _, seed in clients]
        members = Members.drawn([one.data for one in works], [one.work for one in works], streams)
        trainers = [one.trainer for one in assigned]
        return Ready(
            clients,
            members,
            assigned[0].assignment,
            works[0],
            [len(trainer.local.train) for trainer in trainers],
            [trainer.local.train.own_batches for trainer in trainers],
            [*zip(assigned, works, strict=True)],
        )

    def _planned(self, common: Assignment, group: Sequence[Client], bundles: Bundles, pooled: Pooled) -> Ready:
        """Raises WorkFailed if a client's work cannot be prepared."""
        assigned = self._work.assigned(common, *group[0])
        work = assigned.prepare(bundles)
        check_work(work.data, work.work)
        training, seeds = common.training, [seed for _, seed in group]
        streams = [RandomStream(self._device, seed) for seed in seeds]
        steps = plan_batches(pooled.rows, training.batch_size, seeds, **work_of(training))
        once, sizes = None, [len(rows) for rows in pooled.rows]
        whole = rates_of_all(rates_by_step(work.work.settings, steps.counts))
        ahead = [steps.rows, torch.tensor(steps.sizes), whole, torch.tensor([*map(signed, seeds)])]
        if work.work.algorithm.exchanges[work.work.exchange].passes:
            once = plan_batches(pooled.rows, training.batch_size, (), epochs=1)
            ahead.append(once.rows)
        rows, placed_sizes, rates, placed_seeds, *rows_once = tree.uploaded_together(ahead, self._device)
        plan, drawn = Plan(rows, steps.sizes, placed_sizes), list[Tensor]()
        if pooled.draw is not None and self._device.type == "cuda":  # a recorded step draws nothing there
            drawn = drawn_ahead(pooled.draw, pooled.inputs, plan.rows, seeds)
        batches = Planned(
            pooled.inputs, pooled.targets, plan, None if once is None else Plan(rows_once[0], once.sizes),
            pooled.finish, pooled.prepare, streams, drawn, pooled.draw, placed_seeds, pooled.stays,
        )  # fmt: skip
        # With several epochs each one's loss is measured.
        epoch_steps = [-(-size // training.batch_size) if work.data.epoch_steps else 0 for size in sizes]
        contexts = self._contexts(work, common, [client for client, _ in group], sizes)
        members = Members(work.work, contexts, batches, steps.counts, epoch_steps, OwnNumbers(streams), rates)
        return Ready(group, members, assigned.assignment, work, sizes, [0] * len(group), [])

    def _contexts(
        self, work: PreparedWork, given: Assignment, clients: Sequence[str], sizes: Sequence[int]
    ) -> Contexts:
        """The contexts of clients that differ in their examples and states."""
        algorithm, first = work.work.algorithm, work.work.context
        omegas = [omega_of(algorithm, given.training, size) for size in sizes]
        if not algorithm.keeps_client_state:
            return Contexts(replace(first, state={}, omega=1.0), omegas)
        device, common = self._device, replace(first, state={}, omega=1.0)
        initial = mapped(algorithm.client_init(trainable_views(work.model)), lambda it: it.to(device))
        if (together := self._context.states.get_group(clients, initial)) is not None:
            return Contexts(common, omegas, together)
        own = (state_of(algorithm, work.model, self._context.states.get(client)) for client in clients)
        states = [mapped(state, lambda it: it.to(device)) for state in own]
        return Contexts.of_clients(
            [replace(first, state=state, omega=omega) for state, omega in zip(states, omegas, strict=True)]
        )


CPU_BYTES = 1 << 30
"""Memory of a group on a CPU."""
GPU_SHARE = 0.5
"""The share of a GPU's free memory that is used."""
MOST_CLIENTS = 64
"""The most clients in one group: from some size on, larger groups are not faster."""


class GroupSizes:
    """The size of the next group: of the options, else by an estimate, a recorded step, and attempts that failed."""

    def __init__(self, work: ClientWork, device: torch.device, wanted: int) -> None:
        """wanted: 0: as many as memory allows, at most MOST_CLIENTS."""
        self._work, self._device, self._wanted = work, device, wanted
        self.most = wanted
        """The most clients of a group; 0: not known yet."""
        self._client_bytes = 0

    def of(self, common: Assignment, first: Client, bundles: Bundles) -> int:
        """The size, at first by the memory that the first client of the group needs."""
        if self.most:
            return self.most
        try:
            ready = self._work.assigned(common, *first).prepare(bundles)
            with one_thread():
                client_bytes = bytes_of_client(ready.model, ready.data, next(iter(ready.data.complete)))
        except BaseException as error:  # it is reported when the client trains
            if is_interrupt(error):
                raise
            return 1
        free = CPU_BYTES if self._device.type == "cpu" else GPU_SHARE * free_bytes(self._device)
        self.most = _clients_of(free, client_bytes)
        return self.most

    def halve(self, clients: int) -> int:
        """There was no memory for a group of so many clients. Returns the size from now on."""
        self.most = -(-clients // 2)
        return self.most

    def fit_recorded(self, client_bytes: int, clients: int) -> None:
        """Choose the size by the memory of a recorded step, which was measured, in place of the estimate."""
        if client_bytes > self._client_bytes and not self._wanted:
            free = free_bytes(self._device) + client_bytes * clients
            self.most = _clients_of(GPU_SHARE * free, client_bytes)
        self._client_bytes = client_bytes


def _clients_of(free: float, client_bytes: int) -> int:
    """Clients of a group whose memory is so large."""
    return max(1, min(MOST_CLIENTS, int(free // client_bytes)))
