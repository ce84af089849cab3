"""The mean of a round with secure aggregation, from the exact sum of its clients' whole numbers, and what it says.

    Dhat = R^-1 (g sum_i q_i) / sum_i w_i      `algorithms.quantization`; the method's sums are multiples of it

A client that lies about its update spoils the sum, and nobody can tell which one it was. What can be checked is whether
honest clients could have made it: each clips its update to C, so their mean is no longer than C but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import algorithms as fl
from algorithms import tree
from algorithms.quantization import Numbers, Quantizer
from fl_common.privacy.secret_stream import SecretStream
from fl_common.secure_aggregation.rounding import Rounding, rotation_key
from fl_common.secure_aggregation.terms import value_bits_for
from fl_server.aggregation.private_sum import multiples
from fl_server.aggregation.updates import AcceptedUpdates, read_block
from fl_server.run_settings.config import RunConfig
from protos.layout import Layout

SCALARS = 1
"""Numbers of an update besides its values: that of its weight."""
_SLACK = 1e-4


class SpoiledSum(Exception):
    """Honest clients could not have made this sum."""


@dataclass(frozen=True, slots=True)
class Total:
    """The sums of a round's masked updates, without the masks."""

    numbers: Numbers
    """[values], signed."""
    counted: int
    """The sum of `Rounding.counted`."""


@dataclass(frozen=True, slots=True)
class SecureSum:
    """A round's mean, in place of its updates."""

    mean: fl.Tensors
    steps: int
    """K of every client; 1 if the method's sums do not divide by it."""

    def sums(self, exchange: fl.Exchange, info: fl.RoundInfo, updates: AcceptedUpdates) -> dict[str, fl.Tensors]:
        """The method's sums over the tensors of `updates`, as over one client whose delta is the mean."""
        names = [entry.name for entry in updates.shape.layout_of("delta").entries if entry.trainable]
        wanted = exchange.sums([fl.UpdateInfo("mean", 1, self.steps)], info)
        return multiples(wanted, {name: self.mean[name] for name in names})


@dataclass(frozen=True, slots=True)
class SecureMeans:
    """How the updates of a run are rounded, and how a mean is made of their sum."""

    config: RunConfig
    layout: Layout
    """That of the trainable tensors."""

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of an update."""
        if (section := self.config.secure_aggregation) is None:
            raise RuntimeError("expected a run with the section secure_aggregation")
        blank = {
            entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for entry in self.layout.entries
            if entry.trainable
        }
        return Quantizer.like(blank, section.clip, section.bits)

    def rounding(self, round_: int, draw: int, exchange: int = 0) -> Rounding:
        """The rounding of a draw of a round."""
        if (section := self.config.secure_aggregation) is None:
            raise RuntimeError("expected a run with the section secure_aggregation")
        key = rotation_key(self.config.seed, round_, draw, exchange)
        return Rounding(section.clip, section.bits, key.hex(), section.max_examples or 0)

    def value_bits(self, clients: int) -> int:
        """Bits of a number of a masked update."""
        return value_bits_for(self.quantizer.bits, clients)

    def total(self, updates: AcceptedUpdates, rounding: Rounding, keys: Sequence[bytes]) -> Total:
        """The sum of updates that are not masked: the same numbers as that of masked ones. One is read at a time.

        keys: `rounding_key` of each client.
        """
        quantizer, shape = self.quantizer, updates.shape.layout_of("delta")
        numbers, counted = np.zeros(quantizer.values, np.int64), 0
        entries = {entry.name: entry for entry in shape.entries if entry.trainable}
        for info, source, key in zip(updates.cohort, updates.sources, keys, strict=True):
            delta = {
                name: read_block(source, entry, 0, entry.numel).view(entry.shape) for name, entry in entries.items()
            }
            weight, rotation = rounding.weight(info.num_examples), SecretStream(rounding.rotation_key)
            numbers += quantizer.quantize(delta, weight, rotation, SecretStream(key))
            counted += rounding.counted(info.num_examples)
        return Total(numbers, counted)

    @property
    def largest_update(self) -> int:
        """Bytes of a masked update of the largest cohort, as far as the run's settings bound it."""
        bits = self.value_bits(self.config.round.clients_per_round if self.config.round.sampling == "fixed" else 2**16)
        return self.quantizer.values * bits // 8 + 8 * SCALARS

    def mean(self, total: Total, clients: int, rounding: Rounding) -> fl.Tensors:
        """Dhat of so many clients. Raises SpoiledSum."""
        most = rounding.max_examples or 1
        if not clients <= total.counted <= clients * most:
            raise SpoiledSum(
                f"the weights of its {clients} updates add up to {total.counted}, not to {clients} up to"
                f" {clients * most}: a client lied"
            )
        quantizer, weight = self.quantizer, total.counted / most
        mean = quantizer.mean(total.numbers, weight, SecretStream(rounding.rotation_key))
        norm = float(tree.norm(mean))
        rounded = quantizer.step * math.sqrt(quantizer.values) * clients / weight
        if not norm <= rounding.clip * (1 + _SLACK) + rounded:
            raise SpoiledSum(
                f"the mean of its updates has the norm {norm:.3g}, over the clip of {rounding.clip:g}: a client lied"
            )
        return mean
