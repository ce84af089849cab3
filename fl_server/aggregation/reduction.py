"""Reduces the accepted updates of an exchange: a selection, then a plain mean, or a robust centre instead.

A client's share of a round's examples may be limited; the result depends only on the accepted list. For a mean each
payload is read once for all sums over it, in the order of client ids. Cutting tensors into blocks changes no bit
(`algorithms.aggregate`). Updates in the memory of a device are summed there: each operation rounds one number, so the
bits are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

import torch

import algorithms as fl
from algorithms import UpdateInfo, tree
from algorithms.aggregate import mean_of_buffers
from fl_server.aggregation import robust
from fl_server.aggregation.robust import check_outside_reducer
from fl_server.aggregation.updates import AcceptedUpdates, Source, by_block, device_of, joined, neighbours
from fl_server.errors import InvalidInput
from fl_server.run_settings.sections import RoundSection
from protos.codec import Entry, Layout

SumUpdates = Callable[[Sequence[Source], Layout, Sequence[Sequence[float]]], list[fl.Tensors]]
"""What `sum_updates` does, in this process or shared among several."""


def sum_payloads(
    updates: AcceptedUpdates, wanted: Mapping[str, fl.WeightedSum], sum_them: SumUpdates
) -> dict[str, fl.Tensors]:
    """The sums by name; each payload is read once for all the sums over it."""
    totals: dict[str, fl.Tensors] = {}
    for payload in {row.payload: None for row in wanted.values()}:
        names = [name for name, row in wanted.items() if row.payload == payload]
        rows = [wanted[name].coefficients for name in names]
        totals.update(zip(names, sum_them(updates.sources, updates.shape.layout_of(payload), rows), strict=True))
    return totals


def sum_updates(sources: Sequence[Source], layout: Layout, rows: Sequence[Sequence[float]]) -> list[fl.Tensors]:
    """The weighted sum for each row, of the trainable tensors of the updates; in float32 for a lower precision.

    Args:
        sources: the updates, all of this layout, in the order of client id bytes.
        layout: of each update.
        rows: coefficients, one for each update.

    Raises:
        OSError, LayoutError: a file is gone or too short.
    """
    sums: list[fl.Tensors] = [{} for _ in rows]
    device = device_of(sources)
    for together in neighbours([entry for entry in layout.entries if entry.trainable], device):
        wholes = by_block(sources, joined(together), lambda blocks: fl.weighted_sums(blocks, rows), device=device)
        for total, whole in zip(sums, wholes, strict=True):
            total.update(apart(whole, together))
    return sums


def apart(whole: torch.Tensor, entries: Sequence[Entry]) -> fl.Tensors:
    """The tensors of a group, each in memory of its own: the last bit of a norm may depend on the alignment."""
    if len(entries) == 1:
        return {entries[0].name: whole}
    pieces = whole.split([entry.numel for entry in entries])
    return {entry.name: piece.view(entry.shape).clone() for entry, piece in zip(entries, pieces, strict=True)}


def average_buffers(sources: Sequence[Source], layout: Layout, weights: Sequence[float]) -> fl.Tensors:
    """The buffers after a round: floating ones averaged plainly, integers at their maximum.

    Values that are the same in all updates keep their bits, also where they are not finite.
    """

    def mean(blocks: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [mean_of_buffers(blocks, weights)]

    def largest(blocks: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [fl.maximum(blocks)]

    averaged: fl.Tensors = {}
    device = device_of(sources)
    for entry in layout.entries:
        if not entry.trainable:
            reduce = mean if entry.dtype.is_floating_point else largest
            [averaged[entry.name]] = by_block(sources, entry, reduce, device=device)
    return averaged


def capped(cohort: Sequence[UpdateInfo], share: float) -> list[UpdateInfo]:
    """The cohort, with fewer examples for clients that would have more than `share` of the remaining total.

    All capped clients count alike. With fewer than 1 / share clients the limit is impossible, and all count alike.
    """
    cap = _cap([info.num_examples for info in cohort], Fraction(share))
    return [replace(info, num_examples=min(info.num_examples, cap)) for info in cohort]


def _cap(counts: Sequence[int], share: Fraction) -> int:
    """The largest number of examples that does not exceed the share once all larger numbers are cut to it."""
    falling = sorted(counts, reverse=True)
    rest = Fraction(sum(falling))
    for above, largest in enumerate(falling):
        if above * share >= 1:
            break
        # `above` clients at the cap c and the others as they are: c = share * (above * c + rest).
        cap = share * rest / (1 - above * share)
        if largest <= cap:
            return max(1, int(cap))
        rest -= largest
    return falling[-1]


def lighter(cohort: Sequence[UpdateInfo], before: Sequence[float], after: Sequence[float]) -> tuple[str, ...]:
    """The clients whose weights were cut."""
    return tuple(info.client_id for info, was, now in zip(cohort, before, after, strict=True) if now < was)


def left_out(cohort: Sequence[UpdateInfo], taken: Sequence[UpdateInfo]) -> tuple[str, ...]:
    """The clients of a cohort that are not among those whose updates a reducer took."""
    ids = {info.client_id for info in taken}
    return tuple(info.client_id for info in cohort if info.client_id not in ids)


class OtherSum(Protocol):
    """A noisy mean of a run with client-level privacy, the mean of masked updates, or sums over a buffer."""

    def sums(self, exchange: fl.Exchange, info: fl.RoundInfo, updates: AcceptedUpdates) -> dict[str, fl.Tensors]:
        """The method's sums by name, of the tensors that `updates` has."""
        ...


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
    device: torch.device
    """Where the sums go."""
    earlier_sums: Mapping[str, fl.Tensors] = field(default_factory=dict)
    """The sums of the round's earlier exchanges."""
    sum_updates: SumUpdates = sum_updates
    special: OtherSum | None = None
    """What makes the sums in place of the reducer: a noisy mean, masked updates, a buffer."""
    release: Callable[[], object] = lambda: None
    """Called several times during the server update of a large model; it may return freed memory to the kernel."""

    def sums(self, names: Collection[str] | None = None) -> dict[str, fl.Tensors]:
        """The method's sums by name, with the run's reducer in place of the mean. names: only these tensors."""
        updates = self.updates if names is None else self.updates.only(names)
        if self.special is not None:
            made = self.special.sums(self.algorithm.exchanges[self.exchange], self.info, updates)
            return {name: tree.to(tensors, self.device) for name, tensors in made.items()}
        wanted = self.algorithm.exchanges[self.exchange].sums(updates.cohort, self.info)
        if self.section.reducer == "mean" or robust.selects(self.section):  # a selection, then a mean
            made = sum_payloads(updates, wanted, self.sum_updates)
        else:
            made = robust.centre_payloads(self.section, updates, wanted, self.algorithm.weights(updates.cohort))
        return {name: tree.to(tensors, self.device) for name, tensors in made.items()}


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
        return average_buffers(updates.sources, updates.shape.layout_of("delta"), weights)
    return robust.centre_buffers(section, updates, weights)
