"""The distributed engine of rank 0: every rank does a share of the clients' work, with an engine of its own.

The clients with the most examples are shared out first, each to the rank with the fewest examples so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from fl_ops.errors import Refused
from fl_ops.simulate.engines.engine import Bundles, Client, Done, EngineContext, LocalEngine, Order, Part, PartResult
from fl_ops.simulate.ranks import messages
from fl_ops.simulate.ranks.group import Ranks
from fl_tasks import TaskError


class DistributedEngine(LocalEngine):
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

    def work(self, order: Order) -> Iterator[Done]:
        """See `LocalEngine.work`."""
        own, *shares = (order.only(share) for share in self._shares(order.clients))
        self._answers.discard()
        for rank, share in zip(self._ranks.others, shares, strict=True):
            messages.send_order(self._ranks, rank, share, self._context)
        self._answers = answers = messages.Answers(self._ranks, self._ranks.others, self._context)
        yield from self._own.work(own)
        yield from answers.results()

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

    def _shares(self, clients: Sequence[Client]) -> list[list[Client]]:
        """The clients of each rank."""
        shares: list[list[Client]] = [[] for _ in range(self._ranks.size)]
        loads = [0] * len(shares)
        for client, size in sorted(((one, self._context.size_of(one[0])) for one in clients), key=lambda it: -it[1]):
            rank = loads.index(min(loads))
            shares[rank].append(client)
            loads[rank] += max(1, size)
        return shares
