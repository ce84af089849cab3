"""Methods of one formula in numbers worked by hand: f(y) = (y - 4)^2 / 2, one client, eta_l = 0.5, from x = 0."""

from __future__ import annotations

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import everyone, parabolas, path


def test_fedprox_by_hand() -> None:
    """mu = 1, K = 2: d = -4, y = 2; then d = -2 + 1 * (2 - 0) = 0, y = 2."""
    one = parabolas(a=(4.0, 2))
    assert path(one, fl.build("fedprox", mu=1), everyone(one, 1)) == [(2.0,)]


def test_fednova_by_hand() -> None:
    """Deltas 4 in 4 steps and 3 in 1 step, from 1 and 3 examples: p = 1/4, 3/4, tau_eff = 1/4 * 4 + 3/4 * 1 = 1.75.

    x = 1.75 * (1/4 * 4/4 + 3/4 * 3/1) = 1.75 * 2.5 = 4.375.
    """
    fednova = fl.build("fednova")
    updates = [
        (fl.UpdateInfo("a", num_examples=1, num_steps=4), {"w": torch.tensor([4.0])}),
        (fl.UpdateInfo("b", num_examples=3, num_steps=1), {"w": torch.tensor([3.0])}),
    ]
    state = fl.apply_updates(fednova, fednova.init({"w": torch.zeros(1)}), updates, fl.RoundInfo(0, 0.5))
    assert state.x["w"].item() == 4.375


def test_fednova_of_a_proximal_rule_by_hand() -> None:
    """eta_l = 0.5, mu = 1: a constant gradient is stretched by 1 + 0.5 = 1.5 in two steps, by 1 in one.

    p = 1/2: tau_eff = 1.25, so the coefficients are 1.25 / 1.5 / 2 = 5/12 and 1.25 / 2 = 5/8.
    """
    method = fl.build("fedprox", mu=1, normaliser="fednova")
    row = method.sums([fl.UpdateInfo("a", 1, 2), fl.UpdateInfo("b", 1, 1)], fl.RoundInfo(0, 0.5))["Dbar"]
    assert row.coefficients == pytest.approx((5 / 12, 5 / 8))


def test_qg_by_hand() -> None:
    """beta = 0.5, mu = 0.75, K = 1.  Round 0: d = -4, x = 2, G = -4, mhat = 0.25 * -4 = -1.

    Round 1: d = -2 + 0.5 * -1 = -2.5, x = 2 + 1.25 = 3.25, G = -2.5, mhat = 0.75 * -1 + 0.25 * -2.5 = -1.375.
    """
    one = parabolas(a=(4.0, 1))
    assert path(one, fl.build("qg", beta=0.5, mu=0.75), everyone(one, 2), "mhat") == [(2.0, -1.0), (3.25, -1.375)]


def test_mfl_by_hand() -> None:
    """gamma = 0.5, K = 2.  Round 0: v = -4, y = 2; v = -2 - 2 = -4, y = 4; x = 4, u = -4.

    Round 1: v = -2 + 0 = -2, y = 5; v = -1 + 1 = 0, y = 5; x = 5, u = 0.
    """
    one = parabolas(a=(4.0, 2))
    assert path(one, fl.build("mfl", gamma=0.5), everyone(one, 2), "u") == [(4.0, -4.0), (5.0, 0.0)]
