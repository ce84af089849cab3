"""The server half of a round, one group of tensors after the other, so that only its result is ever whole in memory.

The server step of a method treats each entry by itself, so working tensor by tensor changes no bit of the next state.
tests/algorithms checks that for every method. A tensor is never cut: torch may round differently at the end of a block.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain, islice

import torch

import algorithms as fl
from algorithms import tree
from algorithms.aggregate import BLOCK
from algorithms.precision import widened
from fl_server.aggregation.bundles import groups
from fl_server.aggregation.reduction import Reduction
from fl_server.errors import model_of
from protos.codec import Layout

GROUP_BYTES = 1 << 20
"""Bytes of parameters that are reduced and updated together: small tensors share the cost of the calls."""
RELEASE_BYTES = 8 << 20
"""Bytes of parameters after which the heap's free pages are returned.

The blocks and temporaries of a group go to other free places in the heap than those of the group before. So the step
fills all places that the round's messages left, up to a model and more, although it needs a few MiB at a time.
"""


@dataclass(frozen=True, slots=True)
class ServerUpdateStats:
    """Norms and weights of a server update, for the metrics."""

    aggregate: float
    """L2 norm of x_{t+1} - x_t."""
    direction: float
    """L2 norm of the direction sent with the model; 0 without one."""
    cosine: float
    """Between the movement and minus the direction (both then point downhill); 0 if one of them is zero."""
    left_out: tuple[str, ...] = ()
    """Clients with accepted updates that the reducer did not select."""
    capped: tuple[str, ...] = ()
    """Clients with a weight cut by `round.max_client_share`."""
    largest: tuple[str, float] = ("", 0.0)
    """The client with the largest weight of the round, and that weight."""
    clip: float = 0.0
    """C of the round, with client-level privacy."""


class Diverged(Exception):
    """The aggregate is not finite: the last good model stays."""


def apply_server_update(
    reduction: Reduction, state: fl.ServerState, into: fl.ServerState, layout: Layout
) -> ServerUpdateStats:
    """Write the next state into existing memory; `state` is not changed. Raises Diverged.

    Args:
        reduction: of the round's last exchange.
        state: of the round before.
        into: memory for the next state, laid out as `state`.
        layout: of the trainable tensors.
    """
    lengths, exchange, unreleased = _Lengths(), reduction.algorithm.exchanges[reduction.exchange], 0
    for names in groups(layout, GROUP_BYTES):
        part = part_of(state, names)
        earlier = {name: _of(sums, names) for name, sums in reduction.earlier_sums.items()}
        after = _server_step(reduction, part, {**earlier, **reduction.sums(names)})
        tree.copy_(_of(into.x, names), after.x)
        for symbol, tensors in after.memory.items():
            tree.copy_(_of(into.memory[symbol], names), tensors)
        lengths.add(part, after, exchange.direction(part, earlier))
        unreleased += sum(into.x[name].nbytes for name in names)
        if unreleased >= RELEASE_BYTES:
            reduction.release()
            unreleased = 0
    if (stats := lengths.stats()) is None:
        raise _diverged(reduction, "; ", ". Lower the learning rate, or set round.max_update_norm")
    return stats


def _server_step(reduction: Reduction, part: fl.ServerState, sums: Mapping[str, fl.Tensors]) -> fl.ServerState:
    try:
        return reduction.algorithm.server_step(part, sums, reduction.info)
    except (RuntimeError, fl.AlgorithmError) as error:
        # torch raises for a factor that the model's dtype cannot hold, instead of making an infinity of it. The guard
        # around methods makes an AlgorithmError of that.
        if "overflow" not in str(error):
            raise
        raise _diverged(reduction, ": its step overflows; ") from error


def _diverged(reduction: Reduction, why: str, remedy: str = "") -> Diverged:
    round_ = reduction.info.round
    return Diverged(f"the model of round {round_} is not finite{why}{model_of(round_ - 1)} stays{remedy}")


def check_finite(what: str, tensors: fl.Tensors, round_: int) -> None:
    """Raises Diverged unless all values are finite."""
    if not bool(torch.isfinite(tree.norm(widened(tensors)))):
        raise Diverged(f"{what} of round {round_} is not finite; {model_of(round_ - 1)} stays. Lower the learning rate")


class _Lengths:
    """Norms of whole vectors, collected from one group of tensors after the other."""

    def __init__(self) -> None:
        self._movement: list[torch.Tensor] = []
        self._direction: list[torch.Tensor] = []
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._products: list[list[torch.Tensor]] = []
        """The blocks of the scalar product of movement and direction, for each tensor."""

    def add(self, before: fl.ServerState, after: fl.ServerState, direction: fl.Tensors | None) -> None:
        """Add one group of tensors: its states, and the direction sent with the model."""
        movement = tree.subtract(after.x, before.x)
        self._movement += tree.norms(movement)
        for symbol, tensors in {"": after.x, **after.memory}.items():
            self._kept.setdefault(symbol, []).extend(tree.norms(tensors))
        if direction is not None:
            direction = widened(direction)
            self._direction += tree.norms(direction)
            self._products += [_products(movement[name], direction[name]) for name in movement]

    def stats(self) -> ServerUpdateStats | None:
        """The norms of all groups, read from the device at once; None if one of the next state is not finite."""
        norms = [*self._kept.values(), self._movement, *([self._direction] if self._direction else [])]
        wholes = [tree.whole_norm(parts).double() for parts in norms]
        values: list[float] = torch.stack([*wholes, *chain.from_iterable(self._products)]).tolist()
        kept = len(self._kept)
        if not all(map(math.isfinite, values[:kept])):
            return None
        length, *size = values[kept : len(norms)]
        if not size:
            return ServerUpdateStats(length, 0.0, 0.0)
        product, parts = 0.0, iter(values[len(norms) :])
        for blocks in self._products:
            product -= sum(islice(parts, len(blocks)))
        return ServerUpdateStats(length, size[0], product / (length * size[0]) if length and size[0] else 0.0)


def _products(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Parts of the scalar product in float64, block by block: widened whole tensors would take twice their memory."""
    blocks = zip(a.flatten().split(BLOCK), b.flatten().split(BLOCK), strict=True)
    return [torch.dot(one.double(), other.double()) for one, other in blocks]


def part_of(state: fl.ServerState, names: Collection[str]) -> fl.ServerState:
    """The state of these tensors."""
    memory = {symbol: _of(tensors, names) for symbol, tensors in state.memory.items()}
    return fl.ServerState(
        _of(state.x, names), memory, {name: dtype for name, dtype in state.dtypes.items() if name in names}
    )


def _of(tensors: fl.Tensors, names: Collection[str]) -> fl.Tensors:
    return {name: tensors[name] for name in names}
