"""The sums of a round with secure aggregation, from the exact sums of its clients' whole numbers, and what they say.

    V_j = R_j^-1 (g_j sum_i q_ij)       of each payload; `algorithms.quantization`
    S   = A sum_i w_ij v_ij             each of the method's sums is a multiple of one V_j: `algorithms.masked_sums`

A client that lies about its update spoils the sum, and nobody can tell which one it was. What can be checked is whether
honest clients could have made it: each clips its payload to C, so their mean is no longer than C but for rounding.

What such a run excludes is here too: all that needs to see single updates, or to choose among them.
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
from fl_common.secure_aggregation.errors import PlanError
from fl_common.secure_aggregation.plan import plan_of
from fl_common.secure_aggregation.rounding import RoundedPayload, Rounding, rotation_key, rounding_key
from fl_common.secure_aggregation.scalars import Measured, Summed, count_of, scalars_of, summed_of
from fl_common.secure_aggregation.terms import Settings, value_bits_for
from fl_server.aggregation.privacy import discrete_gaussian
from fl_server.aggregation.updates import AcceptedUpdates, UpdateShape, read_block
from fl_server.errors import InvalidInput
from fl_server.rounds.metrics import by_clients
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.privacy import SecureAggregationSection
from protos.layout import Layout

_SLACK = 1e-4
_FINE = 1 + 2.0**-20
"""Clipping in floating point may exceed C by less than this factor."""
_CONSTANT = RateSchedule()
MOST_CLIENTS = 500
"""Clients of a cohort, whose keys and certificates fit into one message."""
_SINGLE = "the coordinator sees no single update"
_CLIP = f"secure_aggregation.clip takes its place, on the devices, for {_SINGLE}"


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


def settings_of(section: SecureAggregationSection) -> Settings:
    """The protocol's own settings."""
    return Settings(section.min_clients, section.max_corrupt, section.max_dropped, section.suite)


def check_secure_aggregation(config: RunConfig) -> None:
    """Raises InvalidInput, with the reason, for a setting that secure aggregation excludes."""
    section, round_ = config.secure_aggregation, config.round
    if section is None:
        return
    wanted: list[tuple[str, object, object, str]] = [
        ("round.close", round_.close, "cohort", "masks are of one cohort, so the others would be lost"),
        ("round.reducer", round_.reducer, "mean", f"{_SINGLE}, which other reducers compare"),
        ("round.max_update_norm", round_.max_update_norm, 0.0, _CLIP),
        ("round.clip_update_norm", round_.clip_update_norm, 0.0, _CLIP),
        ("round.max_relative_norm", round_.max_relative_norm, 0.0, _CLIP),
        ("round.max_relative_payload", round_.max_relative_payload, 0.0, _CLIP),
        ("round.max_client_share", round_.max_client_share, 0.0, "secure_aggregation.max_examples limits weights"),
        ("encodings.update", config.encodings.update, "plain", "secure_aggregation.bits is their encoding"),
        ("evaluation.clients", config.evaluation.clients, 0, "the clients of a round measure the model they received"),
        ("evaluation.averaged_on_clients", config.evaluation.averaged_on_clients, False, "they receive no such model"),
        ("encodings.reference", config.encodings.reference, "none", "secure_aggregation.bits is their encoding"),
    ]  # fmt: skip
    for field, came, right, why in wanted:
        if came != right:
            raise InvalidInput(field, f"{right!r} with [secure_aggregation]: {why}", came)
    if config.local.optimizer is not None and config.local.optimizer.state == "server":
        expected = '"fresh" or "device" with [secure_aggregation]: a rounded second moment may be negative'
        raise InvalidInput("local.optimizer.state", expected, "server")
    if by_clients(config.stop.metric):
        expected = "a metric of the server with [secure_aggregation]: sums over clients are of the round before"
        raise InvalidInput("stop.metric", expected, config.stop.metric)
    cohort = round_.clients_per_round if round_.sampling == "fixed" else config.least
    if cohort > MOST_CLIENTS:
        expected = f"at most {MOST_CLIENTS} with [secure_aggregation]: each client gets the certificates of all"
        raise InvalidInput("round.clients_per_round", expected, cohort)
    try:
        plan_of(settings_of(section), cohort)
    except (PlanError, ValueError) as error:
        where = "round.clients_per_round" if round_.sampling == "fixed" else "round.min_accepted"
        raise InvalidInput(where, f"a cohort that the shares can be had with: {error}", cohort) from error


def check_summed(config: RunConfig, algorithm: fl.Algorithm, schedule: RateSchedule) -> None:
    """Raises InvalidInput unless all sums of the method are made of sums that clients can contribute to alone.

    schedule: of the learning rate over the local steps.
    """
    section, name = config.secure_aggregation, algorithm.name
    if section is None:
        return
    if len(algorithm.exchanges) > 1:
        expected = (
            "a method with one exchange, such as mimelite, with [secure_aggregation]: what follows from the sum of a"
            " first one would need keys of its own"
        )
        raise InvalidInput("algorithm.name", expected, name)
    if algorithm.objective != "uniform":
        expected = (
            'objective = "uniform" with [secure_aggregation], or a method with weights = "examples" and'
            " secure_aggregation.max_examples: such a state at the server is of weights that are no part of the sums"
        )
        raise InvalidInput("algorithm.parameters", expected, f'{name} with objective = "{algorithm.objective}"')
    parts = _parts_of(config, algorithm, schedule)
    if section.max_examples is None and any(part.by_examples for part in parts):
        expected = f'the examples of the heaviest client, or weights = "uniform": {name} weights by examples'
        raise InvalidInput("secure_aggregation.max_examples", expected, "none")
    if section.min_steps is None and any(part.per_step for part in parts):
        expected = (
            f"the steps of the client with the fewest, or a number of local.steps: {name} divides updates by steps"
        )
        raise InvalidInput("secure_aggregation.min_steps", expected, "none")
    others = {part.payload for part in parts} - {"delta"}
    for payload in sorted(others ^ section.clips.keys()):
        expected = f"the largest L2 norm of the payload, which {name} sums" if payload in others else "no such payload"
        raise InvalidInput(f"secure_aggregation.clips.{payload}", expected, section.clips.get(payload, "none"))
    if algorithm.keeps_client_state and len(parts) > len({part.payload for part in parts}):
        expected = (
            f"a number of steps, and uniform weights, with [secure_aggregation]: a client's state in {name} has to be"
            " made of the numbers in the sum, and two sums of its delta are rounded apart"
        )
        raise InvalidInput("local.steps", expected, "none")


def _parts_of(config: RunConfig, algorithm: fl.Algorithm, schedule: RateSchedule) -> set[Summand]:
    """What the clients contribute to the method's sums. Raises InvalidInput if a sum is not made of such parts."""
    name, parts, equal = algorithm.name, set[Summand](), summands_in(1, algorithm, schedule)
    for symbol, part in summands_in(config.local.steps, algorithm, schedule).items():
        if part is None and equal[symbol] is not None:
            expected = (
                f"a number of steps with [secure_aggregation]: {name} needs the steps of each client, or their mean"
            )
            raise InvalidInput("local.steps", expected, "none")
        if part is None:
            expected = (
                f"a method whose coefficients are one number for all clients, by examples or by steps, with"
                f" [secure_aggregation]: {_SINGLE}"
            )
            raise InvalidInput("algorithm.name", expected, name)
        parts.add(part)
    return parts


def check_secure_model(config: RunConfig, layout: Layout) -> None:
    """Raises InvalidInput for a model with running statistics: their range is unknown, so they cannot be rounded."""
    floating = [entry.name for entry in layout.entries if not entry.trainable and entry.dtype.is_floating_point]
    if config.secure_aggregation is not None and floating:
        expected = "a model without running statistics with [secure_aggregation], such as one with group norms"
        raise InvalidInput("task", expected, f"the buffers {', '.join(floating[:3])}")
