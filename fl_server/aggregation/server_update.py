"""The server half of a round, and the sums of a run with `close = "buffer"`: one group of tensors after the other.

So only the result is ever whole in memory. The server step of a method treats each entry by itself, so working tensor
by tensor changes no bit of the next state. tests/algorithms checks that for every method. A tensor is never cut: torch
may round differently at the end of a block.

With a buffer the updates of a step begin from several versions of the model. The directions of the versions are read
as if they were further updates, so each entry of a sum is accumulated in float64 and rounded once. Memory is one block
of each update and of each direction (`algorithms.buffered`). Such a run excludes all that needs one model, or one
cohort, for all clients of a step. Secure aggregation and client-level privacy exclude such runs themselves
(`secure_aggregation`, `privacy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch

import algorithms as fl
from algorithms import tree
from algorithms.aggregate import BLOCK
from algorithms.buffered import BufferedSum, known_of, refusal
from algorithms.precision import widened
from fl_server.aggregation.reduction import Reduction, by_payload, sum_updates
from fl_server.aggregation.task_model import groups
from fl_server.aggregation.updates import AcceptedUpdates, HeldUpdate
from fl_server.errors import InvalidInput, model_of
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.sections import StalenessSection
from protos.codec import Entry, Layout

GROUP_BYTES = 1 << 20
"""Bytes of parameters that are reduced and updated together: small tensors share the cost of the calls."""
RELEASE_BYTES = 8 << 20
"""Bytes of parameters after which the heap's free pages are returned.

The blocks and temporaries of a group go to other free places in the heap than those of the group before. So the step
fills all places that the round's messages left, up to a model and more, although it needs a few MiB at a time.
"""
_STATE = "a state of a device is valid only once its last update has counted, and a client begins again before that"


@dataclass(frozen=True, slots=True)
class ServerUpdateStats:
    """Norms and weights of a server update."""

    norm: float
    """L2 norm of x_{t+1}."""
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
        norm, (length, *size) = values[0], values[kept : len(norms)]
        if not size:
            return ServerUpdateStats(norm, length, 0.0, 0.0)
        product, parts = 0.0, iter(values[len(norms) :])
        for blocks in self._products:
            product -= sum(islice(parts, len(blocks)))
        cosine = product / (length * size[0]) if length and size[0] else 0.0
        return ServerUpdateStats(norm, length, size[0], cosine)


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


class Told(NamedTuple):
    """What the clients of a version were told."""

    version: fl.Version
    direction: Callable[[Collection[str]], fl.Tensors]
    """Names -> these tensors of the direction, as the clients received it. Called if a sum needs them."""


@dataclass(frozen=True, slots=True)
class BufferSum:
    """Takes the place of the sums over a cohort in a server step."""

    wanted: Mapping[str, BufferedSum]
    told: Mapping[int, Told]
    """The versions whose directions the sums need."""

    def sums(self, exchange: fl.Exchange, info: fl.RoundInfo, updates: AcceptedUpdates) -> dict[str, fl.Tensors]:
        """The sums by name, of the tensors that `updates` has."""
        del exchange, info

        def summed(payload: fl.Payload, rows: Mapping[str, BufferedSum]) -> list[fl.Tensors]:
            layout = updates.shape.layout_of(payload)
            entries = tuple(entry for entry in layout.entries if entry.trainable)
            versions = sorted({number for row in rows.values() for number in row.known})
            directions = [_Along.of(self.told[number], entries) for number in versions]
            along = [[row.known.get(number, 0.0) for number in versions] for row in rows.values()]
            coefficients = [[*row.coefficients, *own] for row, own in zip(rows.values(), along, strict=True)]
            return sum_updates([*updates.sources, *directions], layout, coefficients)

        return by_payload(self.wanted, summed)


@dataclass(frozen=True, slots=True)
class _Along(HeldUpdate):
    """U of a version with the offsets of an update's payload, computed block by block."""

    version: fl.Version
    entries: Sequence[Entry]
    """The payload's trainable tensors, by rising offset."""
    direction: fl.Tensors

    @classmethod
    def of(cls, told: Told, entries: Sequence[Entry]) -> _Along:
        """Only the tensors of these entries."""
        return cls(told.version, entries, told.direction([entry.name for entry in entries]))

    @property
    def device(self) -> torch.device:
        """See `HeldUpdate.device`."""
        return next(iter(self.direction.values())).device

    def read(self, entry: Entry, start: int, count: int) -> torch.Tensor:
        """See `HeldUpdate.read`. The entry may be a group of neighbours."""
        size = entry.dtype.itemsize
        first, last = entry.offset + start * size, entry.offset + (start + count) * size
        parts = {
            own.name: self.direction[own.name].flatten()[
                max(first - own.offset, 0) // size : (last - own.offset) // size
            ]
            for own in self.entries
            if own.offset < last and own.end > first
        }
        if not parts:
            return torch.empty(0, dtype=entry.dtype, device=self.device)
        return torch.cat(list(known_of(self.version, parts).values()))


def staleness_rule(config: RunConfig) -> fl.Staleness:
    """The run's weights by staleness. Raises InvalidInput for a rule or a value that is wrong."""
    section = config.round.staleness or StalenessSection()
    try:
        return fl.build_staleness(section.kind, **section.values)
    except fl.AlgorithmError as error:
        raise InvalidInput(f"round.staleness.{error.parameter or 'kind'}", "a rule with its values", error) from error


def check_buffered(config: RunConfig, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput, with the reason, for a setting or a method that a run with a buffer excludes."""
    if config.round.close != "buffer":
        return
    wanted: list[tuple[str, object, object, str]] = [
        ("round.reducer", config.round.reducer, "mean", "robust reducers compare updates of one model"),
        ("round.max_client_share", config.round.max_client_share, 0.0, "a client may be in a buffer more than once"),
        ("encodings.reference", config.encodings.reference, "none", "updates are read before their step"),
        ("personal", list(config.personal), [], _STATE),
        ("local.continue_data", config.local.continue_data, False, _STATE),
        ("encodings.update", "sparse" if config.encodings.sparse else "", "", f"a sparse one leaves a rest: {_STATE}"),
    ]  # fmt: skip
    for field, came, right, why in wanted:
        if came != right:
            raise InvalidInput(field, f'{right!r} with round.close = "buffer": {why}', came)
    if why := refusal(algorithm):
        field = "local.optimizer" if config.local.optimizer is not None else "algorithm.name"
        raise InvalidInput(field, f'another one with round.close = "buffer": {why}', algorithm.name)
    staleness_rule(config)
