"""The clip of a private run that follows the lengths of its updates.

After Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially Private Learning with Adaptive Clipping":

    b_i = 1 if the update of client i is not clipped, else 0
    btilde = 1/2 + (sum_i (b_i - 1/2) + N(0, sigma_b^2)) / (q N)     the noisy share of updates that are NOT clipped
    C <- C * exp(-eta_C * (btilde - gamma))                            gamma: the share that shall not be clipped

Too many unclipped updates make C smaller. Who did not come counts as 1/2, so a client changes the sum by 1/2, and the
denominator is fixed as that of the updates is.

The sums of a round are one release with the run's noise multiplier z. A client changes (sum of updates / C, count) by
at most (1, 1/2), so the noise of the updates is larger by the count's share (theorem 1 of the paper):

    z_sum = (1 / z^2 - 1 / (2 sigma_b)^2)^(-1/2)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fl_common.privacy.secret_stream import SecretStream, derived
from fl_server.aggregation.private_sum import discrete_gaussian
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig

ROUNDED = 1.01
"""An update that its device has clipped is shorter than so many clips, whatever its dtype, and longer than C over it.
"""
_REACH = 2.0**20
"""C stays within this factor of the first one."""
_DEFAULT_SHARE = 20.0
"""sigma_b is the expected number of clients over this, unless the run sets it, as the paper recommends."""


@dataclass(frozen=True, slots=True)
class ClipRule:
    """How C follows the updates."""

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


_RATE = 0.2
"""eta_C of the paper's experiments."""
