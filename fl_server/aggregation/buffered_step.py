"""Runs with `close = "buffer"`: the sums over updates from several versions of the model, and what they exclude.

The directions of the versions are read as if they were further updates, so each entry of a sum is accumulated in
float64 and rounded once. Memory is one block of each update and of each direction (`algorithms.buffered`).

A run with a buffer excludes all that needs one model, or one cohort, for all clients of a step. Secure aggregation and
client-level privacy exclude such runs themselves (`secure_aggregation`, `privacy`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

import algorithms as fl
from algorithms.buffered import BufferedSum, known_of, refusal
from fl_server.aggregation.reduction import sum_updates
from fl_server.aggregation.updates import AcceptedUpdates, HeldUpdate, Source
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.sections import StalenessSection
from protos.codec import Entry

_STATE = "a state of a device is valid only once its last update has counted, and a client begins again before that"


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
        totals: dict[str, fl.Tensors] = {}
        for payload in {row.payload: None for row in self.wanted.values()}:
            rows = {name: row for name, row in self.wanted.items() if row.payload == payload}
            layout = updates.shape.layout_of(payload)
            entries = tuple(entry for entry in layout.entries if entry.trainable)
            versions = sorted({number for row in rows.values() for number in row.known})
            directions = [_Along.of(self.told[number], entries) for number in versions]
            sources: list[Source] = [*updates.sources, *directions]
            coefficients = [
                [*row.coefficients, *(row.known.get(number, 0.0) for number in versions)] for row in rows.values()
            ]
            totals.update(zip(rows, sum_updates(sources, layout, coefficients), strict=True))
        return totals


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
