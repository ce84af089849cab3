"""The sums of a round with secure aggregation, from the exact sums of its clients' whole numbers, and what they say.

    V_j = R_j^-1 (g_j sum_i q_ij)       of each payload; `algorithms.quantization`
    S   = A sum_i w_ij v_ij             each of the method's sums is a multiple of one V_j: `algorithms.masked_sums`

A client that lies about its update spoils the sum, and nobody can tell which one it was. What can be checked is whether
honest clients could have made it: each clips its payload to C, so their mean is no longer than C but for rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import algorithms as fl
from algorithms import tree
from algorithms.aggregate import BLOCK
from algorithms.masked_sums import PROBED, Summand, factors_of, summands_of
from algorithms.optimizers.spec import RateSchedule
from algorithms.quantization import Numbers, Quantizer
from fl_common.privacy.secret_stream import SecretStream, derived
from fl_common.secure_aggregation.rounding import RoundedPayload, Rounding, rotation_key, rounding_key
from fl_common.secure_aggregation.scalars import Measured, Summed, count_of, scalars_of, summed_of
from fl_common.secure_aggregation.terms import value_bits_for
from fl_server.aggregation.private_sum import discrete_gaussian
from fl_server.aggregation.updates import AcceptedUpdates, UpdateShape, read_block
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.privacy import SecureAggregationSection

_SLACK = 1e-4
_FINE = 1 + 2.0**-20
"""Clipping in floating point may exceed C by less than this factor."""
_CONSTANT = RateSchedule()


class SpoiledSum(Exception):
    """Honest clients could not have made this sum."""


@dataclass(frozen=True, slots=True)
class Total:
    """The sums of a round's masked updates, without the masks."""

    numbers: Numbers
    """[values of all payloads], signed."""
    summed: Summed
    """What their scalars say."""


@dataclass(frozen=True, slots=True)
class SumNoise:
    """The noise of a round with client-level privacy, which the coordinator adds to the sum of whole numbers.

    A client's numbers q are R x / g for |x| <= C, rounded, so |q| <= C / g + sqrt(d). Of two clients in each other's
    place these may be opposite; the account takes that into account, and z is relative to one of them.
    """

    noise_multiplier: float
    """z."""
    drawn: int
    """Clients of a cohort: the denominator, however many come."""
    key: bytes
    """The key of the round, the draw and the accepted list; the noise depends on the sum too."""

    def added_to(self, numbers: Numbers, quantizer: Quantizer) -> Numbers:
        """The sums of numbers with discrete Gaussian noise."""
        longest = quantizer.clip / quantizer.step * _FINE + math.sqrt(quantizer.values)
        key = derived(self.key, hashlib.sha256(numbers.astype("<i8").tobytes()).digest())
        made = numbers.copy()
        for number, start in enumerate(range(0, len(made), BLOCK)):
            part = made[start : start + BLOCK]
            stream = SecretStream(derived(key, number))
            part += discrete_gaussian(stream, self.noise_multiplier * longest, len(part)).numpy().astype(np.int64)
        return made


@dataclass(frozen=True, slots=True)
class SummedRound:
    """The round of a sum."""

    clients: int
    """Survivors, whose updates were summed."""
    rounding: Rounding
    info: fl.RoundInfo
    noise: SumNoise | None
    """None: none is added."""


@dataclass(frozen=True, slots=True)
class SecureSum:
    """A round's sums of payloads, in place of its updates."""

    parts: Mapping[Summand, fl.Tensors]
    """sum_i w_i v_i of each summand, divided by the largest sum that the weights could have."""
    factors: Mapping[str, float]
    """The method's sums as multiples of these."""
    summands: Mapping[str, Summand]
    """That of each of the method's sums."""

    def sums(self, exchange: fl.Exchange, info: fl.RoundInfo, updates: AcceptedUpdates) -> dict[str, fl.Tensors]:
        """The method's sums over the tensors of `updates`."""
        del exchange, info
        names = [entry.name for entry in updates.shape.layout_of("delta").entries if entry.trainable]
        return {
            symbol: {name: self.factors[symbol] * self.parts[summand][name] for name in names}
            for symbol, summand in self.summands.items()
        }


def summands_in(
    steps: int | None, algorithm: fl.Algorithm, schedule: RateSchedule = _CONSTANT
) -> dict[str, Summand | None]:
    """The summand of each of a method's sums; None where there is none.

    steps: K of every client; None: each has its own. schedule: of the rate over the steps.
    """
    info = fl.RoundInfo(0, 0.1, rounds=1, population=PROBED, cohort_size=PROBED, schedule=schedule)
    return summands_of(algorithm.exchanges[0], info, 1 if algorithm.skipping else steps)


@dataclass(frozen=True, slots=True)
class SecureMeans:
    """How the updates of a run are rounded, and how its sums are made of theirs."""

    config: RunConfig
    algorithm: fl.Algorithm
    shape: UpdateShape
    """The plain update."""

    @property
    def _section(self) -> SecureAggregationSection:
        if self.config.secure_aggregation is None:
            raise RuntimeError("expected a run with the section secure_aggregation")
        return self.config.secure_aggregation

    @property
    def summands(self) -> dict[str, Summand]:
        """The summand of each of the method's sums."""
        return {name: it for name, it in summands_in(self.config.local.steps, self.algorithm).items() if it is not None}

    @property
    def parts(self) -> list[Summand]:
        """What is summed, in the order of the numbers of an update."""
        return sorted(set(self.summands.values()))

    def quantizer(self, number: int, rounding: Rounding) -> Quantizer:
        """The quantizer of a payload of an update, by its number in the rounding."""
        rule = rounding.payloads[number]
        blank = {
            entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for entry in self.shape.layout_of(rule.payload).entries
            if entry.trainable
        }
        return Quantizer.like(blank, rule.clip, rounding.bits)

    def rounding(self, round_: int, draw: int, exchange: int = 0) -> Rounding:
        """The rounding of a draw of a round."""
        section = self._section
        key = rotation_key(self.config.seed, round_, draw, exchange)
        clips = {"delta": section.clip, **section.clips}
        payloads = [RoundedPayload(it.payload, clips[it.payload], it.by_examples, it.per_step) for it in self.parts]
        fewest = section.min_steps or 0
        every = self.config.evaluation.clients_every
        metrics = section.metrics if every and round_ % every == 0 else ()
        return Rounding(
            section.bits,
            key.hex(),
            tuple(payloads),
            section.max_examples or 0,
            fewest,
            tuple(metrics),
            loss=self.config.client_privacy is None,
        )

    @property
    def values(self) -> int:
        """Numbers of an update."""
        rounding = self.rounding(0, 0)
        return sum(self.quantizer(number, rounding).values for number in range(len(rounding.payloads)))

    def value_bits(self, clients: int) -> int:
        """Bits of a number of a masked update."""
        return value_bits_for(self._section.bits, clients)

    @property
    def largest_update(self) -> int:
        """Bytes of a masked update of the largest cohort, as far as the run's settings bound it."""
        round_ = self.config.round
        bits = self.value_bits(round_.clients_per_round if round_.sampling == "fixed" else 2**16)
        return self.values * bits // 8 + 8 * count_of(self._section.metrics)

    def total(
        self, updates: AcceptedUpdates, rounding: Rounding, seeds: Sequence[int], measured: Sequence[Measured]
    ) -> Total:
        """The sum of updates that are not masked: the same numbers as that of masked ones. One is read at a time.

        seeds: the training seed of each client. measured: by each client.
        """
        sums, rows = [], zip(updates.cohort, measured, strict=True)
        scalars = [scalars_of(rounding.counted(info.num_examples), one, rounding.metrics) for info, one in rows]
        for number, rule in enumerate(rounding.payloads):
            quantizer = self.quantizer(number, rounding)
            entries = [entry for entry in updates.shape.layout_of(rule.payload).entries if entry.trainable]
            numbers = np.zeros(quantizer.values, np.int64)
            for info, source, seed in zip(updates.cohort, updates.sources, seeds, strict=True):
                payload = {e.name: read_block(source, e, 0, e.numel).view(e.shape) for e in entries}
                weight = rounding.weight(number, info.num_examples, info.num_steps)
                key, rotation = rounding_key(seed, 0, number), SecretStream(rounding.rotation_key(number))
                numbers += quantizer.quantize(payload, weight, rotation, SecretStream(key))
            sums.append(numbers)
        return Total(
            np.concatenate(sums), summed_of([sum(row) for row in zip(*scalars, strict=True)], rounding.metrics)
        )

    def sums(self, total: Total, of_round: SummedRound) -> SecureSum:
        """The method's sums over a round's clients; with noise, over the cohort as it was drawn. Raises SpoiledSum."""
        clients, rounding, info, noise = of_round.clients, of_round.rounding, of_round.info, of_round.noise
        most, counted = rounding.max_examples or 1, total.summed.counted
        if not clients <= counted <= clients * most:
            raise SpoiledSum(
                f"the weights of its {clients} updates add up to {counted}, not to {clients} up to"
                f" {clients * most}: a client lied"
            )
        numbers, of = total.numbers, clients
        if noise is not None:
            numbers, of, counted = noise.added_to(numbers, self.quantizer(0, rounding)), noise.drawn, noise.drawn
        parts, at = dict[Summand, fl.Tensors](), 0
        largest = {part: counted / most if part.by_examples else float(of) for part in self.parts}
        for number, part in enumerate(self.parts):
            quantizer = self.quantizer(number, rounding)
            mean = quantizer.mean(
                numbers[at : at + quantizer.values], largest[part], SecretStream(rounding.rotation_key(number))
            )
            rounded = quantizer.step * math.sqrt(quantizer.values) * clients / largest[part]
            if noise is None:  # whether a sum without noise is too long would tell of it
                _check_norm(rounding.payloads[number], mean, rounded)
            parts[part] = mean
            at += quantizer.values
        steps = rounding.min_steps or self.config.local.steps or 1
        factors = factors_of(self.algorithm.exchanges[0], info, self.summands, (of, counted, steps))
        return SecureSum(
            parts,
            {name: factors[name] * largest[part] * _unit(part, rounding) for name, part in self.summands.items()},
            self.summands,
        )


def _unit(part: Summand, rounding: Rounding) -> float:
    """w_i of the method / the weight with which numbers are made."""
    return part.share(rounding.max_examples, rounding.min_steps)


def _check_norm(rule: RoundedPayload, mean: fl.Tensors, rounded: float) -> None:
    """Raises SpoiledSum if a mean is too long for honest clients. rounded: what rounding may add to its norm."""
    norm = float(tree.norm(mean))
    if not norm <= rule.clip * (1 + _SLACK) + rounded:
        which = "" if rule.payload == "delta" else f" of the payload {rule.payload}"
        raise SpoiledSum(
            f"the mean{which} of its updates has the norm {norm:.3g}, over the clip of {rule.clip:g}: a client lied"
        )
