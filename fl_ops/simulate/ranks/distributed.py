"""The distributed engine of rank 0: every rank does a share of the clients' work, with an engine of its own.

The clients with the most examples are shared out first, each to the rank with the fewest examples so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from fl_ops.errors import Refused
from fl_ops.simulate.engines.engine import (
    Bundles,
    EngineContext,
    Evaluated,
    ExamplesOf,
    Failed,
    LocalEngine,
    Part,
    PartResult,
    Trained,
)
from fl_ops.simulate.engines.held import TrainedTogether
from fl_ops.simulate.ranks import messages
from fl_ops.simulate.ranks.group import Ranks
from fl_ops.simulate.ranks.messages import Order
from fl_tasks import TaskError
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment


class DistributedEngine:
    """See `LocalEngine`. The results of this rank's share come first."""

    def __init__(self, context: EngineContext, own: LocalEngine, ranks: Ranks) -> None:
        """own: for this rank's share."""
        self._context, self._own, self._ranks = context, own, ranks
        self._answers = messages.Answers(ranks, [], context)

    def begin(self, bundles: Bundles) -> None:
        """See `LocalEngine.begin`."""
        self._answers.discard()  # the reader of the last results may have stopped before their end
        messages.send_bundles(self._ranks, bundles)
        self._own.begin(bundles)

    def train(
        self, common: Assignment, clients: Sequence[str], seeds: Sequence[int]
    ) -> Iterator[Trained | TrainedTogether | Failed]:
        """See `LocalEngine.train`."""
        seed_of = dict(zip(clients, seeds, strict=True))
        own, *shares = self._shares(clients)
        orders = [
            Order("train", common.SerializeToString(), share, [seed_of[client] for client in share]) for share in shares
        ]
        for result in self._results(orders, self._own.train(common, own, [seed_of[client] for client in own])):
            if not isinstance(result, Evaluated):
                yield result

    def evaluate(
        self, common: EvaluationAssignment, clients: Sequence[str], on: ExamplesOf = "held_out"
    ) -> Iterator[Evaluated | Failed]:
        """See `LocalEngine.evaluate`."""
        own, *shares = self._shares(clients)
        orders = [Order(on, common.SerializeToString(), share, []) for share in shares]
        for result in self._results(orders, self._own.evaluate(common, own, on)):
            if isinstance(result, Evaluated | Failed):
                yield result

    @property
    def report(self) -> str:
        """See `LocalEngine.report`: of this rank's engine."""
        return "; ".join(filter(None, (f"{self._ranks.size} ranks", self._own.report)))

    def share(self, parts: Sequence[Part]) -> list[PartResult] | None:
        """See `LocalEngine.share`: by the processes of this rank."""
        return self._own.share(parts)

    def close(self) -> None:
        """See `LocalEngine.close`. The other ranks end with their run."""
        self._own.close()
        try:
            self._answers.discard()
        except (Refused, TaskError):
            return  # a rank has ended, or its work has: the others end when this process does
        for rank in self._ranks.others:
            with suppress(Refused):
                self._ranks.send(rank, {"do": messages.END})

    def _shares(self, clients: Sequence[str]) -> list[list[str]]:
        """The clients of each rank."""
        shares: list[list[str]] = [[] for _ in range(self._ranks.size)]
        loads = [0] * len(shares)
        for client in sorted(clients, key=self._context.size_of, reverse=True):
            rank = loads.index(min(loads))
            shares[rank].append(client)
            loads[rank] += max(1, self._context.size_of(client))
        return shares

    def _results(
        self, orders: Sequence[Order], own: Iterator[Trained | TrainedTogether | Evaluated | Failed]
    ) -> Iterator[Trained | TrainedTogether | Evaluated | Failed]:
        self._answers.discard()
        for rank, order in zip(self._ranks.others, orders, strict=True):
            order.send(self._ranks, rank, self._context)
        self._answers = answers = messages.Answers(self._ranks, self._ranks.others, self._context)
        yield from own
        yield from answers.results()
