"""The state of a round before its clip factor is known."""

from __future__ import annotations

import torch

from fl_client.storage.client_state_store import NextState


def test_a_factor_of_one_returns_the_same_tensors() -> None:
    """The common case needs no computation."""
    whole = {"c_i": {"w": torch.tensor([0.1])}}
    assert NextState(whole, {"c_i": {"w": torch.tensor([7.0])}}).at(1.0) is whole


def test_a_blend_is_rounded_once() -> None:
    """Half way from 2^24 to -1 is (2^24 - 1) / 2 = 8388607.5, a float32.

    In float32 the difference -1 - 2^24 would be rounded to -2^24, and half way would be 8388608.
    """
    state = NextState({"h": {"w": torch.tensor([-1.0])}}, {"h": {"w": torch.tensor([2.0**24])}})
    assert state.at(0.5)["h"]["w"].item() == 8388607.5


def test_parts_independent_of_the_delta_are_not_blended() -> None:
    """A symbol with equal states keeps its tensors, including infinities."""
    same = {"w": torch.tensor([torch.inf])}
    assert NextState({"A_i": same}, {}).at(0.3)["A_i"] is same
