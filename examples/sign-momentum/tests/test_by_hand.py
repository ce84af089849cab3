"""One round and one block, computed by hand."""

from __future__ import annotations

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import everyone, parabolas, path
from sign_momentum.method import sign_momentum
from sign_momentum.reducers import most_similar, weighted_median

fl.add_method("sign-momentum", sign_momentum)


def test_two_rounds_by_hand() -> None:
    """Two clients with f(y) = (y - b)^2 / 2, b = 2 and 4, one step at eta_l = 1/2, alpha = 1/2, from x = 0.

    Round 0: d = g / 2 = -1 and -2; delta = 1/2 and 1; Dbar = 3/4 = x_1; s = 1; G = -3/4 / (1/2) = -3/2 = M_1.
    Round 1: g = -5/4 and -13/4, c(M) of the tensor (-3/2, 0) = (-3/4, 0), d = g / 2 - 3/8 = -1 and -2; x_2 = 3/2.
    """
    algorithm = fl.build("sign-momentum", alpha=0.5, agreement=1.0)
    federation = parabolas(0.5, ada=(2.0, 1), bob=(4.0, 1))
    assert path(federation, algorithm, everyone(federation, 2), "M") == [(0.75, -1.5), (1.5, -1.5)]


def test_momentum_of_entries_without_agreement_is_dropped() -> None:
    """Clients at b = 2 and -4 pull apart: s = 0, so an agreement of 1/2 leaves no momentum, and x moves as ever."""
    algorithm = fl.build("sign-momentum", alpha=0.5, agreement=0.5)
    federation = parabolas(0.5, ada=(2.0, 1), bob=(-4.0, 1))
    assert path(federation, algorithm, everyone(federation, 1), "M") == [(-0.25, 0.0)]


def test_a_weighted_median_by_hand() -> None:
    """Values 3, 1, 2 with weights 0.2, 0.2, 0.6: up to 1 it is 0.2, up to 2 it is 0.8, so the median is 2."""
    values = torch.tensor([[3.0, -3.0], [1.0, -1.0], [2.0, -2.0]], dtype=torch.float64)
    weights = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    reducer = weighted_median()
    assert reducer.reduced("median", values, weights).tolist() == [2.0, -2.0]
    blended = weighted_median(blend=0.5).reduced("median", values, weights)
    assert blended.tolist() == pytest.approx([2.0, -2.0])


def test_an_opposite_update_is_left_out() -> None:
    """Three updates point the same way and one the other way: with keep = 3/4 the three are kept."""
    deltas = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [1.0, -0.1]], dtype=torch.float64)
    distances = (deltas[:, None] - deltas[None, :]).square().sum(dim=2)
    geometry = fl.Geometry(deltas.square().sum(dim=1), distances)
    kept = most_similar(keep=0.75).selected("similar", geometry, torch.full((4,), 0.25, dtype=torch.float64))
    assert kept == (0, 1, 3)
