"""Aggregation: client weights and weighted sums. The bits depend only on the updates and their order.

Sums are accumulated in float64, one update after the other, and rounded once. Each entry is computed separately, so the
division into blocks changes no bit: a coordinator that sums blocks from files and a program that sums whole updates in
memory get the same result. Callers pass updates in the order of client id bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch

from algorithms import tree
from algorithms.base import (
    Algorithm,
    Exchange,
    Objective,
    Payload,
    RoundInfo,
    ServerState,
    Tensors,
    UpdateInfo,
    Weights,
)
from algorithms.parameters import AlgorithmError
from algorithms.precision import master_dtype

BLOCK = 2**16
"""Entries of a block. With scratch memory it fits a CPU cache: about ten times as fast as a whole tensor."""


def uniform_weights(cohort: Sequence[UpdateInfo]) -> tuple[float, ...]:
    """p_i = 1 / |S|, where S are the updates that arrived."""
    _require_updates(cohort)
    return (1.0 / len(cohort),) * len(cohort)


def example_weights(cohort: Sequence[UpdateInfo]) -> tuple[float, ...]:
    """p_i = n_i / sum_S n_j, summed over the cohort, not over the population."""
    _require_updates(cohort)
    total = sum(update.num_examples for update in cohort)
    return tuple(update.num_examples / total for update in cohort)


def omega(objective: Objective, client: UpdateInfo, round_info: RoundInfo) -> float:
    """Weight of f_i in the objective, 1 on average: omega_i = N n_i / sum n over the population; 1 if uniform."""
    if objective == "uniform":
        return 1.0
    return round_info.need("population") * client.num_examples / round_info.need("population_examples")


WEIGHTS: Mapping[Weights, Callable[[Sequence[UpdateInfo]], tuple[float, ...]]] = {
    "uniform": uniform_weights,
    "examples": example_weights,
}


def weighted_sums(blocks: Iterable[torch.Tensor], coefficients: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    """sum_i row[i] * blocks[i] for each row of coefficients, in one pass over the blocks.

    Args:
        blocks: the same slice of each update, of any shape and one floating dtype. They are read one at a time, so a
            generator may reuse one buffer for all of them. None is changed. A tensor of all of them, [updates, ...], is
            widened as a whole: it takes fewer calls and more memory.
        coefficients: one row for each sum, with one number for each block.

    Returns:
        One tensor for each row, with the blocks' shape and dtype; float32 for blocks of a lower precision.

    Raises:
        ValueError: too few or too many blocks, integer blocks, or blocks of different shapes or dtypes.
    """
    columns = list(zip(*coefficients, strict=True))
    if isinstance(blocks, torch.Tensor) and blocks.is_floating_point() and len(blocks) == len(columns):
        return [_sum_of_rows(blocks, row) for row in coefficients]
    totals: list[torch.Tensor] = []
    wide = product = torch.empty(0, dtype=torch.float64)
    for block, column in zip(_alike(blocks, len(columns)), columns, strict=True):
        if not block.is_floating_point():
            raise ValueError(f"expected blocks of a floating dtype, got {block.dtype}; take the maximum of integers")
        if not totals:
            totals = [torch.zeros_like(block, dtype=torch.float64) for _ in column]
            wide = torch.empty_like(block, dtype=torch.float64)
            product = torch.empty_like(wide) if len(column) > 1 else wide
        wide.copy_(block)
        for total, coefficient in zip(totals, column, strict=True):
            # Not add_(wide, alpha=coefficient): a fused multiply-add may round differently at the end of a block.
            # The last product takes the place of its factor: less memory than a third array fits the cache.
            total.add_(torch.mul(wide, coefficient, out=wide if total is totals[-1] else product))
    return [total.to(master_dtype(block.dtype)) for total in totals]


def _sum_of_rows(blocks: torch.Tensor, row: Sequence[float]) -> torch.Tensor:
    """sum_i row[i] * blocks[i] with the bits of `weighted_sums`: products first, then one addition after the other."""
    factors = tree.uploaded(row, torch.float64, blocks.device)
    products = blocks.double() * factors.view(-1, *[1] * (blocks.ndim - 1))
    if blocks.device.type == "cpu":  # elsewhere the order of a cumulative sum's additions is not promised
        return products.cumsum(0)[-1].to(master_dtype(blocks.dtype), copy=True)
    total = torch.zeros(blocks.shape[1:], dtype=torch.float64, device=blocks.device)
    for product in products.unbind():
        total.add_(product)
    return total.to(master_dtype(blocks.dtype))


def squares_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of each row's values in float64; 0 of none. The number of rows changes no bit of it.

    Values are added in pairs, each by itself: the order of additions of a reduction may depend on the shape.
    """
    wide = rows.to(torch.float64, copy=True)
    wide.mul_(wide)
    width = wide.shape[1]
    while width > 1:
        half = width // 2
        wide[:, :half].add_(wide[:, width - half : width])
        width -= half
    return wide[:, :1].sum(dim=1)  # 0 of an empty row


def maximum(blocks: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest value of each entry. blocks: as in `weighted_sums`, but of any dtype."""
    return reduce(torch.maximum, _alike(blocks)).clone()


def weighted_sums_of_tensors(updates: Sequence[Tensors], coefficients: Sequence[Sequence[float]]) -> list[Tensors]:
    """`weighted_sums` of whole updates in memory: for each row, the sums by tensor name."""
    results: list[Tensors] = [{} for _ in coefficients]
    for name, like in _layout_of(updates).items():
        cuts = zip(*(torch.split(update[name].flatten(), BLOCK) for update in updates), strict=True)
        pieces = [weighted_sums(blocks, coefficients) for blocks in cuts]
        for result, row in zip(results, zip(*pieces, strict=True), strict=True):
            result[name] = torch.cat(row).reshape(like.shape)
    return results


def average_buffers(updates: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The model's buffers after a round: the weighted mean of floating ones, the maximum of integer ones (counters).

    An entry that is the same in all updates keeps its bits, also where it is not finite.

    Server optimizers do not apply to buffers: momentum could make a running variance negative, a mean with p_i >= 0
    cannot.
    """

    def combined(*blocks: torch.Tensor) -> torch.Tensor:
        return mean_of_buffers(blocks, weights) if blocks[0].is_floating_point() else maximum(blocks)

    return tree.map(combined, _layout_of(updates), *updates[1:])


def mean_of_buffers(blocks: Iterable[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted mean of floating buffers; entries that are the same in all blocks keep their bits.

    blocks: as in `weighted_sums`, but each in memory of its own.
    """
    compared = SameEntries(blocks)
    [total] = weighted_sums(compared, [weights])
    return compared.kept(total)


class SameEntries:
    """Iterates over blocks, one at a time, and finds the entries that have the same bits in all of them."""

    def __init__(self, blocks: Iterable[torch.Tensor]) -> None:
        self._blocks = blocks
        self._first: torch.Tensor | None = None
        self._differ: torch.Tensor | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        for block in self._blocks:
            if self._first is None:
                self._first = block
            elif block.shape == self._first.shape:  # the reader of the blocks refuses others
                differ = tree.bits(block) != tree.bits(self._first)
                self._differ = differ if self._differ is None else self._differ | differ
            yield block

    def kept(self, reduced: torch.Tensor) -> torch.Tensor:
        """The reduced block in the blocks' dtype, with the common bits where there are any. After the iteration."""
        if self._first is None:
            raise ValueError("expected at least one block, got none")
        if self._differ is None:
            return self._first.clone()
        return torch.where(self._differ, reduced.to(self._first.dtype), self._first)


Update = tuple[UpdateInfo, Mapping[Payload, Tensors]]
"""One client's update in one exchange: its metadata, and its payloads as sent."""


def sum_exchange(exchange: Exchange, updates: Sequence[Update], round_info: RoundInfo) -> dict[str, Tensors]:
    """The sums of one exchange, bit-equal to a coordinator's.

    Args:
        exchange: of the algorithm.
        updates: in memory, in any order, one for each client.
        round_info: with the facts that the method needs.

    Raises:
        ValueError: no update, two of one client, one without a payload of the exchange or with values that are not
            finite, tensors of different layouts, or a fact that is missing or impossible.
    """
    _check_updates(exchange, updates)
    ordered = sorted(updates, key=lambda update: update[0].client_id.encode())
    wanted = exchange.sums([info for info, _ in ordered], round_info)
    results: dict[str, Tensors] = {}
    for payload in exchange.payloads:
        rows = {name: row.coefficients for name, row in wanted.items() if row.payload == payload}
        if rows:
            sums = weighted_sums_of_tensors([sent[payload] for _, sent in ordered], list(rows.values()))
            results |= dict(zip(rows, sums, strict=True))
    return results


def apply_updates(
    algorithm: Algorithm, state: ServerState, updates: Sequence[tuple[UpdateInfo, Tensors]], round_info: RoundInfo
) -> ServerState:
    """The next server state, bit-equal to a coordinator's. updates: deltas in memory, in any order.

    Only for methods with one exchange and deltas as their only payload. For others use `sum_exchange` or `run_round`.

    Raises:
        AlgorithmError: clients of this method send other payloads too.
        ValueError: as `sum_exchange`.
    """
    sends = [", ".join(exchange.payloads) for exchange in algorithm.exchanges]
    if sends != ["delta"]:
        raise AlgorithmError(
            f"{algorithm.name}: expected a method whose clients send one delta, got one whose clients send "
            f"{', then '.join(sends)}; use run_round, or sum_exchange for each exchange and then server_step"
        )
    round_info = replace(round_info, cohort_size=len(updates))
    sent: list[Update] = [(info, {"delta": delta}) for info, delta in updates]
    return algorithm.server_step(state, sum_exchange(algorithm.exchanges[-1], sent, round_info), round_info)


def _check_updates(exchange: Exchange, updates: Sequence[Update]) -> None:
    counts = Counter(info.client_id for info, _ in updates)
    if repeated := sorted(client for client, count in counts.items() if count > 1):
        raise ValueError(f"expected one update of each client, got more of {', '.join(repeated)}")
    for info, sent in updates:
        if missing := [payload for payload in exchange.payloads if payload not in sent]:
            raise ValueError(
                f"update of {info.client_id}: expected the payloads {', '.join(exchange.payloads)}, got "
                f"{', '.join(sent) or 'none'}; {', '.join(missing)} is missing"
            )
        for payload in exchange.payloads:
            for name, tensor in sent[payload].items():
                # A finite sum proves finite values. Each element is checked only if the sum is not finite.
                if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
                    raise ValueError(
                        f"update of {info.client_id}, {payload}, tensor {name!r}: expected finite values, got a NaN or "
                        "an infinity; leave this update out"
                    )


def _layout_of(updates: Sequence[Tensors]) -> Tensors:
    _require_updates(updates)
    for update in updates[1:]:
        tree.check_layout(updates[0], update, "update")
    return updates[0]


def _require_updates(updates: Sequence[object]) -> None:
    if not updates:
        raise ValueError("expected at least one update, got none; a round without updates changes nothing")


def _alike(blocks: Iterable[torch.Tensor], count: int | None = None) -> Iterator[torch.Tensor]:
    """The blocks, one at a time. Raises ValueError unless there are `count`, or at least one, all of one layout."""
    expected = "at least one block" if count is None else f"{count} blocks, one for each coefficient of a row"
    layout: tuple[list[int], torch.dtype] | None = None
    seen = 0
    for seen, block in enumerate(blocks, start=1):
        if count is not None and seen > count:
            raise ValueError(f"expected {expected}, got more")
        here = (list(block.shape), block.dtype)
        layout = layout or here
        if here != layout:
            raise ValueError(f"expected blocks of one shape and dtype, got {layout} first and {here} as number {seen}")
        yield block
    if seen < (count or 1):
        raise ValueError(f"expected {expected}, got {seen}")
