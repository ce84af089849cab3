"""The mean of a round with client-level privacy, and its clip: whole numbers are summed, and get discrete noise.

    k_i   = round(clipped (delta_i - c) / g)                      whole numbers, for a grid g
    Dhat  = g * (sum_i k_i + noise) / (q N)                     one release; the method's sums are multiples of it

Where clients add a direction of the server to their steps, as FedCM does, that part c of each delta is public: clients
send and clip delta_i - c, and Dhat gets c once, however many clients came.

The clipped updates, of norm C at most, are rounded to the grid, so the sum is exact, whatever its order. One client
more or less changes it by at most C + g sqrt(d) / 2 in d values, which is hardly more than C. The noise is the discrete
Gaussian of z times that, with the bounds of the Gaussian (Canonne, Kamath, Steinke 2020, "The Discrete Gaussian for
Differential Privacy", algorithm 3: discrete Laplace numbers, some of which are rejected). The denominator is the
expected number of clients, never that of those which came (McMahan, Ramage, Talwar, Zhang 2018, "Learning
Differentially Private Recurrent Language Models").

Random numbers are bytes of ChaCha20. The key is of the run's secret, the round, the attempt, the accepted clients and
the exact sum. So a coordinator that restarts makes the same noise, and no two sums share noise: not even those of the
same clients in the same attempt, as after a backup of the ledger from before the round, when a device has new data.

What such runs, and those with private steps, exclude is here too: settings, methods and models for which no bound is
known. The noise must cover all that clients send.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial

import torch
from blake3 import blake3
from torch import Tensor

import algorithms as fl
from algorithms.aggregate import BLOCK
from algorithms.precision import master_dtype
from algorithms.privacy.dp_sgd import conflict
from algorithms.reference import has_reference
from fl_common.privacy.secret_stream import SECRET_BYTES, SecretStream, derived
from fl_server.aggregation.updates import AcceptedUpdates, by_block, device_of
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.privacy import PrivacySection, SecureAggregationSection
from protos.codec import Entry
from protos.layout import Layout

_FINE = 20
"""The grid makes the sensitivity larger by 2^-_FINE at most."""
_SLACK = 1 + 2.0**-_FINE
"""Clipping in floating point may exceed C by less than this factor."""


ROUNDED = 1.01
"""An update that its device has clipped is shorter than so many clips, whatever its dtype, and longer than C over it.
"""
_REACH = 2.0**20
"""C stays within this factor of the first one."""
_DEFAULT_SHARE = 20.0
"""sigma_b is the expected number of clients over this, unless the run sets it, as the paper recommends."""
_RATE = 0.2
"""eta_C of the paper's experiments."""
_STATISTICS = "num_batches_tracked"
"""The buffer that every batch norm of torch has."""
_OTHERS = "whether a client takes part and counts must not depend on the others"


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What a round releases, apart from its data."""

    clip: float
    """C, the largest norm of an update."""
    noise_multiplier: float
    """z."""
    expected: float
    """q N, the expected number of clients."""


@dataclass
class PrivateSum:
    """Makes the noisy mean of one round."""

    mechanism: Mechanism
    values: int
    """d, the values of an update."""
    key: bytes
    """The key of this round, attempt and accepted list: see `key_of_round`."""
    steps: int = 1
    """K of every client; 1 if the method's sums do not divide by it."""
    centre: fl.Tensors | None = None
    """The part of every delta that is public: clients do not send it, and the mean gets it once. None: none is."""
    noise_key: bytes = b""
    """What keys the noise of the release: `key` and the exact sum. Known after `mean`."""

    @cached_property
    def grid(self) -> float:
        """g, a power of two."""
        return 2.0 ** math.floor(math.log2(self.mechanism.clip * 2.0 ** (1 - _FINE) / math.sqrt(self.values)))

    @property
    def sensitivity(self) -> float:
        """The largest change of the sum by one client, in the L2 norm."""
        return self.mechanism.clip * _SLACK + self.grid * math.sqrt(self.values) / 2

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise of the sum, in steps of the grid."""
        return self.mechanism.noise_multiplier * self.sensitivity / self.grid

    def mean(self, updates: AcceptedUpdates) -> fl.Tensors:
        """Dhat of the trainable tensors of these updates, in float32 or the model's higher precision.

        updates: what the clients learnt, as admitted, with their clip factors; there may be none.

        Raises OSError, LayoutError: a file is gone or too short.
        """
        made, totals = fl.Tensors(), self._totals(updates)
        self.noise_key = derived(self.key, _digest(totals))
        for entry in _trained(updates):
            noisy = totals.pop(entry.name).add_(self._noise(entry.name, entry.numel)).mul_(self._per_step)
            if self.centre is not None:
                noisy += self.centre[entry.name].cpu().flatten()
            made[entry.name] = noisy.view(entry.shape).to(master_dtype(entry.dtype))
        return made

    def _totals(self, updates: AcceptedUpdates) -> dict[str, Tensor]:
        """The exact sum of each trainable tensor in steps of the grid, flat, float64, on the CPU."""
        device = device_of(updates.sources)
        rows = [partial(self._steps, info.clip_factor) for info in updates.cohort]
        totals = {entry.name: torch.zeros(entry.numel, dtype=torch.float64) for entry in _trained(updates)}
        for entry in _trained(updates) if rows else ():
            [whole] = by_block(updates.sources, entry, partial(_added, rows), device=device)
            totals[entry.name] = whole.cpu().flatten()
        return totals

    @property
    def _per_step(self) -> float:
        """A step of the grid in the mean."""
        return self.grid / self.mechanism.expected

    def sums(self, exchange: fl.Exchange, info: fl.RoundInfo, updates: AcceptedUpdates) -> dict[str, fl.Tensors]:
        """The method's sums, as over one client whose delta is the mean. Raises as `mean`."""
        return multiples(exchange.sums([fl.UpdateInfo("mean", 1, self.steps)], info), self.mean(updates))

    def _steps(self, factor: float, block: Tensor) -> Tensor:
        """A clipped block in steps of the grid: whole numbers in float64, whose sums are exact below 2^53."""
        return block.to(torch.float64).mul(factor / self.grid).round_()

    def _noise(self, tensor: str, count: int) -> Tensor:
        """Whole numbers [count] of the discrete Gaussian, float64, by blocks with streams of their own."""
        starts = range(0, count, BLOCK)
        parts = [
            discrete_gaussian(
                SecretStream(derived(self.noise_key, tensor, number)), self.deviation, min(BLOCK, count - start)
            )
            for number, start in enumerate(starts)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _trained(updates: AcceptedUpdates) -> list[Entry]:
    return [entry for entry in updates.shape.layout_of("delta").entries if entry.trainable]


def _digest(totals: Mapping[str, Tensor]) -> bytes:
    """The digest of exact sums. They are hashed as integers: -0.0 is 0."""
    hashed = blake3()
    for name in sorted(totals):
        hashed.update(name.encode())
        hashed.update(totals[name].to(torch.int64).numpy().tobytes())
    return hashed.digest()


def _added(rows: Sequence[Callable[[Tensor], Tensor]], blocks: Iterable[Tensor]) -> list[Tensor]:
    """The sum of the blocks, each after its row."""
    total: Tensor | None = None
    for block, row in zip(blocks, rows, strict=True):
        steps = row(block)
        total = steps if total is None else total.add_(steps)
    if total is None:
        raise ValueError("expected a block of each update, got none")
    return [total]


def seed_of_draws(secret: bytes) -> int:
    """The seed of a private run's cohorts. secret: the run's, so that nobody without it can compute them."""
    return int.from_bytes(derived(secret, "draws"), "big")


def key_of_round(secret: bytes, round_: int, attempt: int, clients: Sequence[str]) -> bytes:
    """The key of a round, without its sum. secret: the run's, of SECRET_BYTES; clients: the accepted ones, in order."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"expected a secret of {SECRET_BYTES} bytes, got {len(secret)}")
    return derived(secret, "noise", round_, attempt, *clients)


def discrete_gaussian(random: SecretStream, deviation: float, count: int) -> Tensor:
    """`count` whole numbers, float64: P(k) is proportional to exp(-k^2 / (2 deviation^2)).

    A discrete Laplace number k of scale t = floor(deviation) + 1 is accepted with the probability
    exp(-(|k| - deviation^2 / t)^2 / (2 deviation^2)). Probabilities are float64 and compared with 53 random bits; the
    numbers behind |k| have 106, so that no whole number is skipped in the tail.
    """
    scale, made, have, step = float(math.floor(deviation) + 1), list[Tensor](), 0, 0
    centre, spread = deviation * deviation / scale, math.sqrt(2.0) * deviation
    while have < count:
        tries = 64 + 7 * (count - have) // 5
        high, low, accepts = torch.frombuffer(random("noise", step, 24 * tries), dtype=torch.int64).split(tries)
        size = _bits(low).add_(1.0).mul_(2.0**-53).add_(_bits(high)).mul_(2.0**-53).log_().mul_(-scale).floor_()
        chance = size.sub(centre).div_(spread).square_().neg_().exp_()
        kept, negative = _bits(accepts).mul_(2.0**-53) < chance, (low & 1).bool()
        kept &= ~((size == 0) & negative)  # with two signs 0 would come twice as often
        made.append(torch.where(negative, -size, size)[kept])
        have, step = have + len(made[-1]), step + 1
    return torch.cat(made)[:count] if made else torch.zeros(0, dtype=torch.float64)


def _bits(words: Tensor) -> Tensor:
    """The upper 53 bits of each word as a whole number, float64."""
    return (words >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64)


def multiples(wanted: Mapping[str, fl.WeightedSum], mean: fl.Tensors) -> dict[str, fl.Tensors]:
    """The method's sums as multiples of the mean. wanted: the sums over one client of weight 1."""
    return {
        name: {tensor: row.coefficients[0] * value for tensor, value in mean.items()} for name, row in wanted.items()
    }


@dataclass(frozen=True, slots=True)
class ClipRule:
    """How C follows the lengths of the updates.

    After Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially Private Learning with Adaptive Clipping":

        b_i = 1 if the update of client i is not clipped, else 0
        btilde = 1/2 + (sum_i (b_i - 1/2) + N(0, sigma_b^2)) / (q N)     the noisy share of updates that are NOT clipped
        C <- C * exp(-eta_C * (btilde - gamma))                            gamma: the share that shall not be clipped

    Too many unclipped updates make C smaller. Who did not come counts as 1/2, so a client changes the sum by 1/2, and
    the denominator is fixed as that of the updates is.

    The sums of a round are one release with the run's noise multiplier z. A client changes (sum of updates / C,
    count) by at most (1, 1/2), so the noise of the updates is larger by the count's share (theorem 1 of the paper):

        z_sum = (1 / z^2 - 1 / (2 sigma_b)^2)^(-1/2)
    """

    first: float
    """C of the first round."""
    quantile: float
    """gamma."""
    rate: float
    """eta_C."""
    noise: float
    """sigma_b, in clients."""
    noise_multiplier: float
    """z of the whole release; less than 2 sigma_b."""
    expected: float
    """q N."""

    @property
    def noise_multiplier_of_sum(self) -> float:
        """z_sum."""
        return 1.0 / math.sqrt(1.0 / self.noise_multiplier**2 - 1.0 / (2.0 * self.noise) ** 2)

    def count(self, clip: float, norms: Iterable[float], key: bytes) -> float:
        """2 sum_i (b_i - 1/2) with its noise, a whole number. norms: of the updates as they came; key: of the noise."""
        votes = sum(1 if norm < clip / ROUNDED else -1 for norm in norms)
        [noise] = discrete_gaussian(SecretStream(derived(key, "unclipped")), 2.0 * self.noise, 1).tolist()
        return votes + float(noise)

    def next(self, clip: float, count: float) -> float:
        """C of the next round. count: as `count` makes it."""
        share = 0.5 + count / (2.0 * self.expected)
        # An exponent of some hundreds is out of the reach, and would overflow.
        change = math.exp(min(100.0, max(-100.0, -self.rate * (share - self.quantile))))
        return min(self.first * _REACH, max(self.first / _REACH, clip * change))


def clip_rule(config: RunConfig) -> ClipRule | None:
    """The rule of a private run; None if its clip is fixed. Raises InvalidInput for noise that no sum could have."""
    privacy = config.client_privacy
    if privacy is None or privacy.clip_quantile is None:
        return None
    expected, z = config.round.rate * config.population, privacy.noise_multiplier
    noise = max(expected / _DEFAULT_SHARE, z) if privacy.clip_noise is None else privacy.clip_noise
    if 2.0 * noise <= z:
        what = f"over noise_multiplier / 2, {z / 2:g}: the count alone would cost more than the whole round"
        raise InvalidInput("privacy.clip_noise", what, f"{noise:g}")
    rate = _RATE if privacy.clip_rate is None else privacy.clip_rate
    return ClipRule(privacy.clip, privacy.clip_quantile, rate, noise, z, expected)


def check_privacy(config: RunConfig) -> None:
    """Raises InvalidInput for a setting with which a run would not keep its promise, or no bound of it is known."""
    round_, privacy = config.round, config.client_privacy
    if privacy is None:
        return
    of_server = config.local.optimizer is not None and config.local.optimizer.state == "server"
    secure = config.secure_aggregation
    sampling, why_sampling = ("bernoulli", _OTHERS) if secure is None else ("fixed", "its keys are of one cohort")
    wanted: list[tuple[str, object, object, str]] = [
        ("round.reducer", round_.reducer, "mean", "the noise is for a sum"),
        ("round.sampling", round_.sampling, sampling, why_sampling),
        ("round.close", round_.close, "cohort", _OTHERS),
        ("round.quorum", round_.quorum, None, _OTHERS),
        ("round.min_accepted", round_.min_accepted, None, _OTHERS),
        ("round.max_relative_norm", round_.max_relative_norm, 0.0, _OTHERS),
        ("round.max_relative_payload", round_.max_relative_payload, 0.0, _OTHERS),
        ("round.max_client_share", round_.max_client_share, 0.0, "all clients weigh the same"),
        ("round.clip_update_norm", round_.clip_update_norm, 0.0, "privacy.clip takes its place"),
        ("evaluation.clients_every", config.evaluation.clients_every, 0, "the metrics of clients have no noise"),
        ("encodings.update", config.encodings.update, "plain", "a decoded update may be longer than the clip"),
    ]
    for field, came, right, why in wanted:
        if came != right:
            raise InvalidInput(field, f"{'none' if right is None else repr(right)} with [privacy]: {why}", came)
    if secure is not None:
        _check_with_sums(privacy, secure)
    if of_server:
        raise InvalidInput("local.optimizer.state", '"fresh" or "device" with [privacy]', "server")
    if not config.population:
        raise InvalidInput("population", "N, the clients that the run may ever draw from, with [privacy]", 0)
    if privacy.delta * config.population > 1:
        most = f"at most 1 / population, {1 / config.population:.3g}"
        raise InvalidInput("privacy.delta", most, f"{privacy.delta:g}")
    clip_rule(config)


def _check_with_sums(privacy: PrivacySection, secure: SecureAggregationSection) -> None:
    """Raises InvalidInput for a setting of privacy that secure aggregation excludes, or has twice."""
    if privacy.clip_quantile is not None:
        expected = "none with [secure_aggregation]: nobody sees which updates are clipped"
        raise InvalidInput("privacy.clip_quantile", expected, privacy.clip_quantile)
    if privacy.clip != secure.clip:
        raise InvalidInput("secure_aggregation.clip", f"privacy.clip, {privacy.clip:g}: devices clip once", secure.clip)


def check_one_release(config: RunConfig, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput unless all sums of the method are multiples of the clients' mean delta, which gets noise."""
    name, [first, *more] = algorithm.name, algorithm.exchanges
    if more or first.payloads != ("delta",) or algorithm.keeps_client_state:
        why = "whose clients send their delta alone, with [privacy]: other payloads and states would need noise too"
        raise InvalidInput("algorithm.name", f"a method {why}", name)
    if len({shares_of(algorithm, examples, 1) for examples in (1, 7)}) > 1 or algorithm.objective != "uniform":
        expected = '"uniform" with [privacy]: a weight by examples tells of them'
        raise InvalidInput("algorithm.parameters.weights", expected, "examples")
    if config.local.steps is None and len({shares_of(algorithm, 1, steps) for steps in (1, 7)}) > 1:
        expected = f"a number of steps with [privacy]: {name} divides an update by its steps, which epochs make secret"
        raise InvalidInput("local.steps", expected, "none")


def check_private_model(config: RunConfig, layout: Layout) -> None:
    """Raises InvalidInput for running statistics in a private run: they are means over clients, without noise.

    Clients refuse batch norm with privacy of records.
    """
    names = [entry.name for entry in layout.entries if entry.name.rpartition(".")[2] == _STATISTICS]
    if config.record_privacy is not None and names:
        raise InvalidInput(
            "task",
            "a model without batch norm with [privacy], because the gradient of each example is clipped alone: use"
            " torch.nn.GroupNorm",
            f"batch norm at {names[0].rpartition('.')[0] or 'the model itself'!r}",
        )
    floating = [entry.name for entry in layout.entries if not entry.trainable and entry.dtype.is_floating_point]
    if config.client_privacy is not None and floating:
        expected = "a model without running statistics with [privacy], such as one with group norms"
        raise InvalidInput("task", expected, f"the buffers {', '.join(floating[:3])}")


def has_centre(config: RunConfig, algorithm: fl.Algorithm) -> bool:
    """Whether a public part of the deltas is taken away before they are clipped: the steps along the direction."""
    plain = config.local.optimizer is None and config.local.steps is not None
    alone = config.secure_aggregation is None  # in a masked sum nobody could leave it out for others
    return config.client_privacy is not None and alone and plain and has_reference(algorithm)


def shares_of(algorithm: fl.Algorithm, examples: int, steps: int) -> tuple[tuple[str, fl.Payload, float], ...]:
    """Name, payload and coefficient of one of two clients in each sum. The other one has one example and one step."""
    cohort = [fl.UpdateInfo("a", examples, steps), fl.UpdateInfo("b", 1, 1)]
    sums = algorithm.exchanges[0].sums(cohort, fl.RoundInfo(0, 0.1, rounds=1, population=2, cohort_size=2))
    return tuple((name, row.payload, row.coefficients[0]) for name, row in sums.items())


def check_record_privacy(config: RunConfig, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput, with the reason, for a run whose clients would send more than private steps."""
    if why := conflict(algorithm):
        raise InvalidInput(
            "algorithm.name",
            "a method whose steps can be made private, such as fedavg or fedcm, with [privacy]",
            f"{algorithm.name}: {why}",
        )
    one, many = algorithm.weights([fl.UpdateInfo("a", 1, 1), fl.UpdateInfo("b", 3, 1)])
    if Fraction(one) != Fraction(many) or algorithm.objective != "uniform":
        raise InvalidInput(
            "algorithm.parameters",
            'weights = "uniform" and objective = "uniform" with [privacy], for clients send no example counts',
            "weights by examples",
        )
    refused = {
        "personal": (bool(config.personal), "none with [privacy]: personal parts are trained without noise"),
        "local.continue_data": (
            config.local.continue_data,
            "false with [privacy], whose steps draw each example by itself",
        ),
        "local.max_gradient_norm": (
            bool(config.local.max_gradient_norm),
            "0 with [privacy], whose clip limits the gradient of each example",
        ),
        "evaluation.clients_every": (
            bool(config.evaluation.clients_every),
            "0 with [privacy]: what clients measure on their held-out examples has no noise",
        ),
    }
    for field, (given, expected) in refused.items():
        if given:
            raise InvalidInput(field, expected, "one that is set")
