"""The server half of a round, group of tensors by group: only what is kept of it is ever whole in memory.

A method's server step looks at each entry by itself, so taking the tensors one after the other changes no bit of the
next state. (tests/algorithms holds every method to that.) A tensor is never cut: at the end of a block torch may round
otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

import algorithms as fl
from algorithms import tree
from algorithms.aggregate import BLOCK
from fl_server.bundles import groups
from fl_server.robust import Collected, reduce_payloads
from fl_server.run_config import RoundSection
from protos.codec import Layout

GROUP_BYTES = 1 << 20
"""Of parameters that are reduced and stepped together: small tensors share the calls that a step costs."""


@dataclass(frozen=True, slots=True)
class StepNorms:
    """How long the vectors of a step were, for the metrics."""

    aggregate: float
    """L2 norm of x_{t+1} - x_t."""
    direction: float
    """L2 norm of what was sent beside the model; 0 without."""
    cosine: float
    """Between the movement and minus the direction (both point downhill then); 0 where one of them is zero."""
    left_out: tuple[str, ...] = ()
    """Clients whose accepted updates a choosing reducer did not take."""
    capped: tuple[str, ...] = ()
    """Clients whose examples weighed less than they are, for `round.max_client_share`."""
    largest: tuple[str, float] = ("", 0.0)
    """The client with the largest weight of the round, and that weight."""


class Diverged(Exception):
    """The aggregate is not finite: the last good model stays."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What came of an exchange, and what the method makes of it."""

    algorithm: fl.Algorithm
    exchange: int
    section: RoundSection
    info: fl.RoundInfo
    collected: Collected
    """The updates that are taken."""

    def sums(self, names: Collection[str] | None = None) -> dict[str, fl.Tensors]:
        """The sums that the method wants, with the run's reducer in the place of the mean; of all tensors, or these."""
        collected = self.collected
        if names is not None:
            collected = replace(collected, shape=collected.shape.only(names))
        wanted = self.algorithm.exchanges[self.exchange].sums(collected.cohort, self.info)
        return reduce_payloads(self.section, collected, wanted, self.algorithm.weights(collected.cohort))


@dataclass(frozen=True, slots=True)
class ServerStep:
    """The server half of a round."""

    last: Exchanged
    before: Mapping[str, fl.Tensors]
    """The sums of the exchanges before the last one."""

    def apply(self, state: fl.ServerState, into: fl.ServerState, layout: Layout) -> StepNorms:
        """Write the next state into memory that is there already; `state` is left as it is. Raises Diverged.

        Args:
            state: of the round before.
            into: laid out as `state`, with the same memories.
            layout: of the trainable tensors.
        """
        lengths, exchange = _Lengths(), self.last.algorithm.exchanges[self.last.exchange]
        for names in groups(layout, GROUP_BYTES):
            part = _part(state, names)
            before = {name: _of(sums, names) for name, sums in self.before.items()}
            after = self._after(part, {**before, **self.last.sums(names)})
            tree.copy_(_of(into.x, names), after.x)
            for symbol, tensors in after.memory.items():
                tree.copy_(_of(into.memory[symbol], names), tensors)
            lengths.add(part, after, exchange.direction(part, before))
        if not lengths.finite:
            raise Diverged(self._diverged("; ", ". Lower the learning rate, or set round.max_update_norm"))
        return lengths.norms()

    def _after(self, part: fl.ServerState, sums: Mapping[str, fl.Tensors]) -> fl.ServerState:
        try:
            return self.last.algorithm.server_step(part, sums, self.last.info)
        except RuntimeError as error:
            # A factor that the model's dtype cannot hold: torch does not make an infinity of it.
            if "overflow" not in str(error):
                raise
            raise Diverged(self._diverged(": its step overflows; ")) from error

    def _diverged(self, why: str, remedy: str = "") -> str:
        round_ = self.last.info.round
        return f"the model of round {round_} is not finite{why}the model of round {round_ - 1} stays{remedy}"


class _Lengths:
    """Norms of whole vectors, from tensors as they go by."""

    def __init__(self) -> None:
        self._movement: list[torch.Tensor] = []
        self._direction: list[torch.Tensor] = []
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._product = 0.0

    def add(self, before: fl.ServerState, after: fl.ServerState, direction: fl.Tensors | None) -> None:
        """One group of tensors: its states, and what was sent beside the model."""
        movement = tree.subtract(after.x, before.x)
        self._movement += tree.norms(movement)
        for symbol, tensors in {"": after.x, **after.memory}.items():
            self._kept.setdefault(symbol, []).extend(tree.norms(tensors))
        if direction is not None:
            self._direction += tree.norms(direction)
            self._product -= sum(_product(movement[name], direction[name]) for name in movement)

    @property
    def finite(self) -> bool:
        """Whether each part of the next state has a norm."""
        return all(bool(torch.isfinite(tree.whole_norm(norms))) for norms in self._kept.values())

    def norms(self) -> StepNorms:
        """Of all that was added."""
        length = float(tree.whole_norm(self._movement))
        if not self._direction:
            return StepNorms(length, 0.0, 0.0)
        size = float(tree.whole_norm(self._direction))
        return StepNorms(length, size, self._product / (length * size) if length and size else 0.0)


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    """The scalar product, in float64 and block by block: whole tensors would be there twice as wide."""
    blocks = zip(a.flatten().split(BLOCK), b.flatten().split(BLOCK), strict=True)
    return sum(float(torch.dot(one.double(), other.double())) for one, other in blocks)


def _part(state: fl.ServerState, names: Collection[str]) -> fl.ServerState:
    return fl.ServerState(
        _of(state.x, names), {symbol: _of(tensors, names) for symbol, tensors in state.memory.items()}
    )


def _of(tensors: fl.Tensors, names: Collection[str]) -> fl.Tensors:
    return {name: tensors[name] for name in names}
