"""From many updates to one: weights, and sums whose bits depend on nothing but the updates and their order.

Sums are accumulated in float64, one update after the other, and rounded once. Every entry is computed by itself, so
how the tensors are cut into blocks changes no bit: a coordinator sums blocks that it reads from files, a program that
holds the updates sums them whole, and both get the same. Callers give updates in the order of client id bytes.
"""

from __future__ import annotations

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

BLOCK = 2**16
"""Entries in a block that stays in a CPU's cache, scratch included: some ten times as fast as a whole large tensor."""


def uniform_weights(cohort: Sequence[UpdateInfo]) -> tuple[float, ...]:
    """p_i = 1 / |S|, with the realised |S|."""
    _require_updates(cohort)
    return (1.0 / len(cohort),) * len(cohort)


def example_weights(cohort: Sequence[UpdateInfo]) -> tuple[float, ...]:
    """p_i = n_i / sum_S n_j: over the cohort, not over the population."""
    _require_updates(cohort)
    total = sum(update.num_examples for update in cohort)
    return tuple(update.num_examples / total for update in cohort)


def omega(objective: Objective, client: UpdateInfo, round_info: RoundInfo) -> float:
    """How much f_i counts beside the others, 1 on average: omega_i = N n_i / sum n over the population, or 1."""
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
        blocks: the same slice of each update, any shape, one floating dtype. They are taken one at a time, so a
            generator that reads files may give them all in one memory. None is changed.
        coefficients: one row for each sum; in a row one number for each block.

    Returns:
        One tensor for each row, of the blocks' shape and dtype. (To half types torch rounds by way of float32.)

    Raises:
        ValueError: too few or too many blocks, or blocks of integers or of unlike shape or dtype.
    """
    columns = list(zip(*coefficients, strict=True))
    totals: list[torch.Tensor] = []
    wide = product = torch.empty(0, dtype=torch.float64)
    for block, column in zip(_alike(blocks, len(columns)), columns, strict=True):
        if not block.is_floating_point():
            raise ValueError(f"expected blocks of a floating dtype, got {block.dtype}; take the maximum of integers")
        if not totals:
            totals = [torch.zeros_like(block, dtype=torch.float64) for _ in column]
            wide, product = (torch.empty_like(block, dtype=torch.float64) for _ in range(2))
        wide.copy_(block)
        for total, coefficient in zip(totals, column, strict=True):
            # Not add_(wide, alpha=coefficient): a fused multiply-add may round otherwise at the end of a block.
            total.add_(torch.mul(wide, coefficient, out=product))
    return [total.to(block.dtype) for total in totals]


def maximum(blocks: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest value of each entry over the blocks, which are as in `weighted_sums` but of any dtype."""
    return reduce(torch.maximum, _alike(blocks)).clone()


def weighted_sums_of_tensors(updates: Sequence[Tensors], coefficients: Sequence[Sequence[float]]) -> list[Tensors]:
    """`weighted_sums` of whole updates that are in memory: for each row the sums by name."""
    results: list[Tensors] = [{} for _ in coefficients]
    for name, like in _layout_of(updates).items():
        cuts = zip(*(torch.split(update[name].flatten(), BLOCK) for update in updates), strict=True)
        pieces = [weighted_sums(blocks, coefficients) for blocks in cuts]
        for result, row in zip(results, zip(*pieces, strict=True), strict=True):
            result[name] = torch.cat(row).reshape(like.shape)
    return results


def average_buffers(updates: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The model's buffers after a round: floating ones averaged with p_i, integer ones (counters) at their maximum.

    Server optimizers never see buffers: momentum could make a running variance negative; a mean of p_i >= 0 cannot.
    """

    def combined(*blocks: torch.Tensor) -> torch.Tensor:
        return weighted_sums(blocks, [weights])[0] if blocks[0].is_floating_point() else maximum(blocks)

    return tree.map(combined, _layout_of(updates), *updates[1:])


Update = tuple[UpdateInfo, Mapping[Payload, Tensors]]
"""One client's answer in one exchange: the facts about it, and its payloads as they were sent."""


def sum_exchange(exchange: Exchange, updates: Sequence[Update], round_info: RoundInfo) -> dict[str, Tensors]:
    """The sums of one exchange for updates in memory, in any order, as a coordinator would make them."""
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
    """A whole server step for deltas in memory, in any order: the next state, as a coordinator would make it.

    For methods of one exchange that want deltas alone; `sum_exchange` is for all.
    """
    round_info = replace(round_info, cohort_size=len(updates))
    sent: list[Update] = [(info, {"delta": delta}) for info, delta in updates]
    return algorithm.server_step(state, sum_exchange(algorithm.exchanges[-1], sent, round_info), round_info)


def _layout_of(updates: Sequence[Tensors]) -> Tensors:
    _require_updates(updates)
    for update in updates[1:]:
        tree.check_layout(updates[0], update, "update")
    return updates[0]


def _require_updates(updates: Sequence[object]) -> None:
    if not updates:
        raise ValueError("expected at least one update, got none; a round without updates moves nothing")


def _alike(blocks: Iterable[torch.Tensor], count: int | None = None) -> Iterator[torch.Tensor]:
    """The blocks, one at a time: at least one, `count` if given, all of the first one's shape and dtype."""
    expected = "at least one block" if count is None else f"{count} blocks, one for each coefficient of a row"
    layout: tuple[list[int], torch.dtype] | None = None
    seen = 0
    for seen, block in enumerate(blocks, start=1):
        if count is not None and seen > count:
            raise ValueError(f"expected {expected}, got more")
        here = (list(block.shape), block.dtype)
        layout = layout or here
        if here != layout:
            raise ValueError(f"expected blocks alike, got {layout} first and {here} as number {seen}")
        yield block
    if seen < (count or 1):
        raise ValueError(f"expected {expected}, got {seen}")
