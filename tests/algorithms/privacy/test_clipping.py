"""The clip of a whole update: its norm, what it leaves alone, and that threads change no bit."""

from __future__ import annotations

import math

import pytest
import torch

from algorithms.privacy.clipping import clipped, norm_of

LONG = {"w": torch.tensor([[3.0, 0.0], [0.0, 0.0]]), "b": torch.tensor([4.0]), "none": torch.zeros(0)}


def test_a_longer_update_is_scaled_and_a_shorter_one_is_kept() -> None:
    """Its direction stays; a limit that is not reached changes no bit."""
    assert norm_of(LONG) == 5.0
    short = clipped(LONG, 0.5)
    assert norm_of(short) == pytest.approx(0.5)
    torch.testing.assert_close(short["w"], 0.1 * LONG["w"])
    for most in (5.0, math.inf):
        assert clipped(LONG, most) is LONG
    assert clipped({}, 1.0) == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_stays_and_rounding_is_within_a_hundredth(dtype: torch.dtype) -> None:
    """The coordinator takes what is at most 1 % longer."""
    update = {"w": torch.randn(4000, generator=torch.Generator().manual_seed(1)).to(dtype)}
    made = clipped(update, 0.25)
    assert made["w"].dtype == dtype
    assert norm_of(made) == pytest.approx(0.25, rel=0.01)


def test_threads_change_no_bit() -> None:
    """A device's number of threads is its own, and the norm of an update of many values is the same."""
    update, before = {"w": torch.randn(300_001, generator=torch.Generator().manual_seed(2))}, torch.get_num_threads()
    norms = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            norms.append(norm_of(update))
    finally:
        torch.set_num_threads(before)
    assert norms[0] == norms[1]
