"""Reduces the accepted updates of an exchange with the run's reducer: a plain mean, or a robust reducer instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import algorithms as fl
from fl_server.aggregation import mean, robust
from fl_server.aggregation.outside import check_outside_reducer
from fl_server.aggregation.shapes import AcceptedUpdates
from fl_server.errors import InvalidInput
from fl_server.round_config import RoundSection


@dataclass(frozen=True, slots=True)
class Reduction:
    """One exchange's updates, and the sums that the method makes of them."""

    algorithm: fl.Algorithm
    exchange: int
    section: RoundSection
    """It names the reducer."""
    info: fl.RoundInfo
    updates: AcceptedUpdates
    """The selected updates (`select_updates`)."""
    earlier_sums: Mapping[str, fl.Tensors] = field(default_factory=dict)
    """Of the round's earlier exchanges."""
    sum_updates: mean.SumUpdates = mean.sum_updates
    release: Callable[[], object] = lambda: None
    """Called several times during the server update of a large model; it may return freed memory to the kernel."""

    def sums(self, names: Collection[str] | None = None) -> dict[str, fl.Tensors]:
        """The method's sums by name, with the run's reducer in place of the mean. names: only these tensors."""
        updates = self.updates if names is None else self.updates.only(names)
        wanted = self.algorithm.exchanges[self.exchange].sums(updates.cohort, self.info)
        if self.section.reducer == "mean" or robust.selects(self.section):  # a selection, then a mean
            return mean.sum_payloads(updates, wanted, self.sum_updates)
        return robust.centre_payloads(self.section, updates, wanted, self.algorithm.weights(updates.cohort))


def check_reducer(section: RoundSection, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput when the run's reducer and its method exclude each other, or the reducer has too few."""
    check_outside_reducer(section)
    if section.reducer != "mean" and (why := robust.conflict(section, algorithm)):
        raise InvalidInput("round.reducer", f'"mean" with {algorithm.name}: {why}', section.reducer)


def select_updates(section: RoundSection, updates: AcceptedUpdates, weights: Sequence[float]) -> AcceptedUpdates:
    """The updates that the reducer uses: a selection by the deltas as admitted, or all updates.

    weights: the method's p_i of all updates.
    """
    if section.reducer == "mean" or not robust.selects(section):
        return updates
    selected = robust.select(section, updates, weights)
    return replace(
        updates, cohort=[updates.cohort[i] for i in selected], sources=[updates.sources[i] for i in selected]
    )


def reduce_buffers(section: RoundSection, updates: AcceptedUpdates, weights: Sequence[float]) -> fl.Tensors:
    """The model's buffers after a round, with the run's reducer in place of the mean and of the maximum."""
    if section.reducer == "mean":
        return mean.average_buffers(updates.sources, updates.shape.layout_of("delta"), weights)
    return robust.centre_buffers(section, updates, weights)
