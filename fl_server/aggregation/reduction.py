"""Reduces the accepted updates of an exchange: a selection, then a plain mean, or a robust centre instead.

A client's share of a round's examples may be limited; the result depends only on the accepted list. For a mean each
payload is read once for all sums over it, in the order of client ids. Cutting tensors into blocks changes no bit
(`algorithms.aggregate`). Updates in the memory of a device are summed there: each operation rounds one number, so the
bits are those of the CPU.

Robust reducers are median, trimmed mean, multi-Krum and those from outside. Their memory is one block times the cohort
for median and trimmed mean; multi-Krum adds the distances of all pairs. Every entry of a centre is computed by itself,
so cutting tensors into blocks changes no bit of it. Built-in reducers work on the device that has the updates. A
reducer from outside gets tensors of the CPU, for which its author tried it. `algorithms.reducers.robust` derives how
these reducers fit into the sums of a method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

import algorithms as fl
from algorithms import UpdateInfo, tree
from algorithms.aggregate import SameEntries, mean_of_buffers
from algorithms.buffered import BufferedSum
from algorithms.precision import master_dtype
from algorithms.reducers.robust import (
    contribution_scales,
    median_cut,
    multi_krum,
    squared_distances,
    stacked,
    trimmed_cut,
    trimmed_maximum,
    trimmed_mean,
)
from fl_common.units import counted
from fl_server.aggregation.task_model import CPU
from fl_server.aggregation.updates import AcceptedUpdates, Source, by_block, device_of, joined, neighbours
from fl_server.errors import InvalidInput
from fl_server.run_settings.sections import RoundSection
from protos.codec import Entry, Layout

BLOCK_ENTRIES = 1 << 13
"""Entries of one update in a block. Distances are summed block by block, so their last bits depend on this number."""
DEVICE_BLOCK_BYTES = 1 << 30
"""The bytes of a block of all updates in float64 on another device than a CPU, where only calls cost."""

R = TypeVar("R", fl.WeightedSum, BufferedSum)
Blocks = Iterable[torch.Tensor]
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Contributions [clients, entries] -> [entries], both float64."""


def selects(section: RoundSection) -> bool:
    """Whether the run's reducer selects updates, whose mean is then taken."""
    outside = outside_reducer(section)
    return section.reducer == "krum" or (outside is not None and outside.select is not None)


def conflict(section: RoundSection, algorithm: fl.Algorithm) -> str:
    """Why the method does not work with the run's robust reducer; empty if it does."""
    if algorithm.needs_population or algorithm.keeps_client_state:
        return "the states of its clients must add up to the server's state, which needs a mean of all updates"
    if "fednova" in (algorithm.name, algorithm.parameters.get("normaliser")):
        return "its step is as long as the step counts that clients report, so one client could report any length"
    sent = [payload for exchange in algorithm.exchanges for payload in exchange.payloads]
    if selects(section) and sent != ["delta"]:
        return "updates are selected by their deltas, and its clients send other payloads, which nothing would check"
    return ""


def _selected(section: RoundSection, updates: AcceptedUpdates, weights: Sequence[float]) -> tuple[int, ...]:
    """Positions of the updates that the reducer keeps, by their clipped deltas. weights: p_i of the method."""
    outside = outside_reducer(section)
    if outside is None:
        return multi_krum(_distances(updates), section.krum_byzantine, section.krum_keep)
    distances = _distances(updates, with_zero=True)  # the last row is that to the zero vector
    geometry = fl.Geometry(distances[-1, :-1].clone(), distances[:-1, :-1].clone())
    return outside.selected(section.reducer, geometry, as_weights(weights))


def _distances(updates: AcceptedUpdates, *, with_zero: bool = False) -> torch.Tensor:
    """Squared distances between the clipped deltas, [n, n]; with_zero: and to a last one that is 0, [n + 1, n + 1].

    They are on the CPU, read from the device of the updates at once.
    """
    device = device_of(updates.sources)
    factors = torch.tensor([[info.clip_factor] for info in updates.cohort], dtype=torch.float64, device=device)
    size = len(factors) + with_zero
    distances = torch.zeros(size, size, dtype=torch.float64, device=device)

    def measure(blocks: Blocks) -> list[torch.Tensor]:
        deltas = stacked(blocks) * factors
        distances.add_(squared_distances(nn.functional.pad(deltas, (0, 0, 0, 1)) if with_zero else deltas))
        return []

    for entry in updates.shape.layout_of("delta").entries:
        if entry.trainable:
            _by_block(updates.sources, entry, measure, device)
    return distances.cpu()


def _by_block(
    sources: Sequence[Source],
    entry: Entry,
    reduce: Callable[[Blocks], list[torch.Tensor]],
    device: torch.device,
) -> list[torch.Tensor]:
    """See `by_block`."""
    entries = BLOCK_ENTRIES if device.type == "cpu" else max(BLOCK_ENTRIES, DEVICE_BLOCK_BYTES // (8 * len(sources)))
    return by_block(sources, entry, reduce, entries, device)


def by_payload(
    rows: Mapping[str, R], reduced: Callable[[fl.Payload, Mapping[str, R]], list[fl.Tensors]]
) -> dict[str, fl.Tensors]:
    """Sums by name. reduced: a payload and the rows over it -> a sum for each; so each payload is read once."""
    sums: dict[str, fl.Tensors] = {}
    for payload in dict.fromkeys(row.payload for row in rows.values()):
        own = {name: row for name, row in rows.items() if row.payload == payload}
        sums |= zip(own, reduced(payload, own), strict=True)
    return {name: sums[name] for name in rows}


def centre_payloads(
    section: RoundSection, updates: AcceptedUpdates, sums: Mapping[str, fl.WeightedSum], weights: Sequence[float]
) -> dict[str, fl.Tensors]:
    """The centre in place of each weighted sum, by name. weights: the method's weights p_i of the updates."""
    reduce, device = _reduce(section, weights), _device(section, updates)

    def centred(payload: fl.Payload, rows: Mapping[str, fl.WeightedSum]) -> list[fl.Tensors]:
        scales = [contribution_scales(row.coefficients, weights) for row in rows.values()]
        return centre_updates(updates.sources, updates.shape.layout_of(payload), scales, reduce, device)

    return by_payload(sums, centred)


def centre_buffers(section: RoundSection, updates: AcceptedUpdates, weights: Sequence[float]) -> fl.Tensors:
    """The centre of the buffers, in place of their mean or maximum.

    A selection is made by deltas, and a selected update may still lie in its buffers: their median over all is used.
    Entries that are the same in all updates keep their bits.
    Counters, of which a mean takes the maximum, have the median of a reducer from outside too.
    """
    cut, device = _cut(section, len(updates.sources)), _device(section, updates)
    reduce = partial(trimmed_mean, cut=cut) if selects(section) else _reduce(section, weights)

    def centre(blocks: Blocks) -> list[torch.Tensor]:
        alike = list(compared := SameEntries(blocks))
        if alike[0].is_floating_point():
            return [compared.kept(reduce(stacked(alike)))]
        return [trimmed_maximum(torch.stack(alike), cut)]

    centres: fl.Tensors = {}
    for entry in updates.shape.layout_of("delta").entries:
        if not entry.trainable:
            [centres[entry.name]] = _by_block(updates.sources, entry, centre, device)
    return centres


def _reduce(section: RoundSection, weights: Sequence[float]) -> Reduce:
    """The run's reducer of contributions. weights: p_i of the method."""
    outside, p = outside_reducer(section), as_weights(weights)
    if outside is None:
        return partial(trimmed_mean, cut=_cut(section, len(weights)))
    return lambda values: outside.reduced(section.reducer, values, p)


def _device(section: RoundSection, updates: AcceptedUpdates) -> torch.device:
    """The device of the centres."""
    return CPU if outside_reducer(section) is not None else device_of(updates.sources)


def _cut(section: RoundSection, count: int) -> int:
    """Values that a centre of `count` updates leaves out on each side."""
    return trimmed_cut(count, section.trim) if section.reducer == "trimmed_mean" else median_cut(count)


def centre_updates(  # noqa: PLR0913, PLR0917 - what is read, and how it is reduced
    sources: Sequence[Source],
    layout: Layout,
    scales: Sequence[Sequence[float]],
    reduce: Reduce,
    device: torch.device = CPU,
) -> list[fl.Tensors]:
    """Reduce the scaled updates' trainable tensors for each row of scales, rounded once, as a mean is.

    Args:
        sources: the updates, all of this layout.
        layout: of each update.
        scales: rows of one factor for each update.
        reduce: of the values of a block.
        device: of these values and of the result.

    Raises:
        OSError, LayoutError: a file is gone or too short.
    """
    factors = [torch.tensor(row, dtype=torch.float64, device=device).unsqueeze(1) for row in scales]
    centres: list[fl.Tensors] = [{} for _ in scales]
    for entry in layout.entries:
        if not entry.trainable:
            continue

        def centre(blocks: Blocks, dtype: torch.dtype = entry.dtype) -> list[torch.Tensor]:
            values = stacked(blocks)
            return [reduce(values * factor).to(master_dtype(dtype)) for factor in factors]

        for result, whole in zip(centres, _by_block(sources, entry, centre, device), strict=True):
            result[entry.name] = whole
    return centres


def outside_reducer(section: RoundSection) -> fl.Reducer | None:
    """The run's reducer if it is from outside, with its parameters. The process must have loaded it.

    Raises AlgorithmError for an unknown reducer, and for a parameter that it does not take.
    """
    if section.reducer in fl.BUILT_IN_REDUCERS:
        return None
    return fl.build_reducer(section.reducer, **section.reducer_parameters)


def check_outside_reducer(section: RoundSection) -> None:
    """Raises InvalidInput unless every round that closes has enough updates for the run's reducer from outside."""
    try:
        reducer = outside_reducer(section)
    except fl.AlgorithmError as error:
        field = ".".join(filter(None, ("round.reducer_parameters", error.parameter)))
        raise InvalidInput(field, "a value that the reducer takes", error) from error
    if reducer is None or reducer.fewest == 1:
        return
    if section.sampling != "fixed":
        raise InvalidInput(
            "round.sampling",
            f'"fixed" with reducer = "{section.reducer}", which needs {counted(reducer.fewest, "update")}: a '
            "cohort may be too"
            " small",
            section.sampling,
        )
    if section.fewest < reducer.fewest:
        raise InvalidInput(
            "round.quorum", f'at least {reducer.fewest} with reducer = "{section.reducer}"', section.fewest
        )


def as_weights(weights: Sequence[float]) -> torch.Tensor:
    """p_i as a reducer gets them, [clients], float64."""
    return torch.tensor(list(weights), dtype=torch.float64)


SumUpdates = Callable[[Sequence[Source], Layout, Sequence[Sequence[float]]], list[fl.Tensors]]
"""What `sum_updates` does, in this process or shared among several."""


def sum_payloads(
    updates: AcceptedUpdates, wanted: Mapping[str, fl.WeightedSum], sum_them: SumUpdates
) -> dict[str, fl.Tensors]:
    """The sums by name; each payload is read once for all the sums over it."""

    def summed(payload: fl.Payload, rows: Mapping[str, fl.WeightedSum]) -> list[fl.Tensors]:
        coefficients = [row.coefficients for row in rows.values()]
        return sum_them(updates.sources, updates.shape.layout_of(payload), coefficients)

    return by_payload(wanted, summed)


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

    def reduced(floating: bool, blocks: Blocks) -> list[torch.Tensor]:
        return [mean_of_buffers(blocks, weights) if floating else fl.maximum(blocks)]

    averaged: fl.Tensors = {}
    device = device_of(sources)
    for entry in layout.entries:
        if not entry.trainable:
            reduce = partial(reduced, entry.dtype.is_floating_point)
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
        if self.section.reducer == "mean" or selects(self.section):  # a selection, then a mean
            made = sum_payloads(updates, wanted, self.sum_updates)
        else:
            made = centre_payloads(self.section, updates, wanted, self.algorithm.weights(updates.cohort))
        return {name: tree.to(tensors, self.device) for name, tensors in made.items()}


def check_reducer(section: RoundSection, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput when the run's reducer and its method exclude each other, or the reducer has too few."""
    check_outside_reducer(section)
    if section.reducer != "mean" and (why := conflict(section, algorithm)):
        raise InvalidInput("round.reducer", f'"mean" with {algorithm.name}: {why}', section.reducer)


def select_updates(section: RoundSection, updates: AcceptedUpdates, weights: Sequence[float]) -> AcceptedUpdates:
    """The updates that the reducer uses: a selection by the deltas as admitted, or all updates.

    weights: the method's p_i of all updates.
    """
    if not selects(section):
        return updates
    kept = _selected(section, updates, weights)
    return replace(updates, cohort=[updates.cohort[i] for i in kept], sources=[updates.sources[i] for i in kept])


def reduce_buffers(section: RoundSection, updates: AcceptedUpdates, weights: Sequence[float]) -> fl.Tensors:
    """The model's buffers after a round, with the run's reducer in place of the mean and of the maximum."""
    if section.reducer == "mean":
        return average_buffers(updates.sources, updates.shape.layout_of("delta"), weights)
    return centre_buffers(section, updates, weights)
