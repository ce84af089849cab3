"""The accountant: upper bounds, and near to those of two other accountants."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from fl_common.privacy.accountant import Mechanism, _log_moment, epsilon_of
from tests.marks import slow_except

CASES = [
    (1.0, 0.04, 1000, 1e-5, 9.2974, 8.4920),
    (0.6, 0.01, 5000, 1e-5, 17.3678, 15.6252),
    (2.0, 1.0, 100, 1e-5, 35.0818, 33.1037),
    (4.0, 0.1, 200, 1e-5, 1.5568, 1.4217),
    (1.1, 256 / 60000, 14040, 1e-5, 2.5944, 2.3796),
    (0.4, 0.05, 10, 1e-5, 16.9484, 14.1349),
]
"""(z, q, steps, delta, epsilon by RDP, epsilon by PLD); computed by dp-accounting 0.6.0 on 2026-11-27."""


@pytest.mark.parametrize(("z", "q", "steps", "delta", "rdp", "pld"), CASES)
def test_epsilon_is_an_upper_bound_near_that_of_a_second_accountant(
    z: float, q: float, steps: int, delta: float, rdp: float, pld: float
) -> None:
    """Our orders between whole ones are on a line, which costs at most a tenth where epsilon is very large."""
    found = epsilon_of({Mechanism(z, q): steps}, delta)
    assert pld <= found
    assert rdp * 0.9999 <= found <= rdp * (1.01 if rdp < 10 or q == 1.0 else 1.1)


@pytest.mark.filterwarnings("ignore")  # it warns of its own orders
@pytest.mark.parametrize(
    ("z", "q", "steps", "delta"), slow_except([case[:4] for case in CASES], *(case[:4] for case in CASES[2:4]))
)
def test_epsilon_recomputed_by_opacus(z: float, q: float, steps: int, delta: float) -> None:
    """Its accountant adds up privacy loss numerically, which is tight; ours is over it, and by less than a third."""
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    prv = accountants.create_accountant("prv")
    prv.history = [(z, q, steps)]
    tight = prv.get_epsilon(delta)
    assert tight * 0.99 <= epsilon_of({Mechanism(z, q): steps}, delta) <= tight * 1.34


def test_without_sampling_it_is_the_bound_of_the_gaussian_mechanism() -> None:
    """One step with a large z: the best order is known, and the bound is over the exact epsilon of Balle and Wang."""
    found = epsilon_of({Mechanism(10.0, 1.0): 1}, 1e-5)
    exact = 0.3407  # delta(epsilon) = Phi(1/2z - epsilon z) - e^epsilon Phi(-1/2z - epsilon z)
    assert exact < found < 0.40


def test_steps_add_up_in_any_order() -> None:
    """Runs of other mechanisms on the same examples add up, and more steps never cost less."""
    one, two = Mechanism(1.0, 0.05), Mechanism(2.0, 0.1)
    both = epsilon_of({one: 100, two: 50}, 1e-5)
    assert both == epsilon_of({two: 50, one: 100}, 1e-5)
    assert both > max(epsilon_of({one: 100}, 1e-5), epsilon_of({two: 50}, 1e-5))
    assert both < epsilon_of({one: 100}, 1e-5) + epsilon_of({two: 50}, 1e-5)
    assert epsilon_of({one: 101}, 1e-5) > epsilon_of({one: 100}, 1e-5)
    assert epsilon_of({}, 1e-5) == epsilon_of({one: 0}, 1e-5) == 0.0


def test_extreme_values_are_finite() -> None:
    """Next to no noise, next to no sampling, and very many steps."""
    for z, q, steps in ((0.01, 0.5, 10), (50.0, 1e-9, 10**9), (1e6, 1.0, 1), (1e6, 1e-3, 10**6)):
        for fixed_size in (False, True):
            assert math.isfinite(epsilon_of({Mechanism(z, q, fixed_size): steps}, 1e-12))


@pytest.mark.parametrize(("z", "q"), [(0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (1.0, 0.0), (1.0, 1.1)])
def test_impossible_mechanisms_are_refused(z: float, q: float) -> None:
    """The error names both values."""
    with pytest.raises(ValueError, match="expected a noise multiplier over 0, and a rate over 0 and at most 1"):
        Mechanism(z, q)


def test_delta_is_a_probability() -> None:
    """With delta of 0 or 1 there is no epsilon."""
    for delta in (0.0, 1.0):
        with pytest.raises(ValueError, match="expected delta over 0 and below 1"):
            epsilon_of({}, delta)


FIXED = [(8.0, 0.01, 1000), (4.0, 0.05, 200), (2.0, 0.1, 10), (20.0, 0.5, 100), (3.0, 0.001, 5000), (6.0, 1.0, 20)]
"""(z, q, steps) of samples of a fixed size."""


@pytest.mark.parametrize(("z", "q", "steps"), FIXED)
def test_samples_of_a_fixed_size_by_a_second_accountant(z: float, q: float, steps: int) -> None:
    """dp-accounting has the same theorems, and not the bound of the whole data.

    Its noise multiplier is relative to the change by a replacement, which is twice the norm of a contribution.
    """
    dp = pytest.importorskip("dp_accounting", reason="the extra privacy is not installed")
    second = dp.rdp.RdpAccountant(
        orders=[*range(2, 65), 80, 96, 128, 192, 256],
        neighboring_relation=dp.NeighboringRelation.REPLACE_ONE,
    )
    noise = dp.GaussianDpEvent(z / 2)
    second.compose(noise if q == 1.0 else dp.SampledWithoutReplacementDpEvent(1000, round(1000 * q), noise), steps)
    tighter, found = second.get_epsilon(1e-5), epsilon_of({Mechanism(z, q, fixed_size=True): steps}, 1e-5)
    whole = epsilon_of({Mechanism(z, 1.0, fixed_size=True): steps}, 1e-5)
    assert 0.95 * min(tighter, whole) <= found <= min(tighter, whole) * (1 + 1e-6)


@pytest.mark.parametrize("s", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("q", [1 / 3, 2 / 5, 4 / 5])
def test_samples_of_a_fixed_size_by_integration(s: float, q: float) -> None:
    """The divergence of the sums of two small populations, integrated, is below the bound.

    All values but one are 0. That one has the norm 1/2 at most and is replaced by another, so the noise of the sum is
    around its value with the probability q of being drawn, else around 0. z is s over 1/2.
    """
    mechanism = Mechanism(2 * s, q, fixed_size=True)
    points, step = np.linspace(-20 * s, 20 * s, 40_001, retstep=True)

    def normal(mean: float) -> npt.NDArray[np.float64]:
        made: npt.NDArray[np.float64] = np.exp(-((points - mean) ** 2) / (2 * s * s)) / (s * math.sqrt(2 * math.pi))
        return made

    def density(value: float) -> npt.NDArray[np.float64]:
        return (1 - q) * normal(0.0) + q * normal(value)

    for left, right in ((0.5, -0.5), (0.5, 0.0), (0.0, 0.5)):
        for order in (2, 3, 8):
            ratio = density(left) / density(right)
            moment = float(np.sum(density(left) * ratio ** (order - 1)) * step)
            assert math.log(moment) <= _log_moment(mechanism, order) + 1e-9


def test_samples_of_two_kinds_do_not_add_up() -> None:
    """Their neighbours differ: one client more, or another one in its place."""
    with pytest.raises(ValueError, match="expected samples of one kind"):
        epsilon_of({Mechanism(1.0, 0.1): 1, Mechanism(1.0, 0.1, fixed_size=True): 1}, 1e-5)
