"""The accountant: upper bounds, and near to those of two other accountants."""

from __future__ import annotations

import math

import pytest

from fl_common.privacy.accountant import Mechanism, epsilon_of

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
@pytest.mark.parametrize(("z", "q", "steps", "delta"), [case[:4] for case in CASES])
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
    for mechanism, steps in ((Mechanism(0.01, 0.5), 10), (Mechanism(50.0, 1e-9), 10**9), (Mechanism(1e6, 1.0), 1)):
        assert math.isfinite(epsilon_of({mechanism: steps}, 1e-12))


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
