"""Averages of models: the weights of every model, worked by hand, and the same bits in blocks of any size."""

from __future__ import annotations

import pytest
import torch

from algorithms.averaging import Averaging, mean_of, stepped


def weights(rule: Averaging, rounds: int) -> list[float] | None:
    """The weight of each committed model in the mean after so many rounds: the models are unit vectors."""
    sums: dict[str, torch.Tensor] = {}
    for round_ in range(rounds):
        x = torch.eye(rounds)[round_]
        for name, term in rule.terms(round_).items():
            sums[name] = stepped(sums[name] if term.keep else None, x, term)
    mean = rule.mean(rounds - 1)
    return None if mean is None else mean_of(sums[mean.sum], mean, torch.float64).tolist()


@pytest.mark.parametrize(
    ("rule", "rounds", "expected"),
    [
        pytest.param(Averaging("ema", decay=0.5), 1, [1.0], id="ema-first"),
        pytest.param(Averaging("ema", decay=0.5), 3, [1 / 7, 2 / 7, 4 / 7], id="ema"),
        pytest.param(Averaging("tail", start=2), 2, None, id="tail-before"),
        pytest.param(Averaging("tail", start=2), 4, [0, 0, 1 / 2, 1 / 2], id="tail"),
        pytest.param(Averaging("window", window=4), 3, [1 / 3] * 3, id="window-first"),
        pytest.param(Averaging("window", window=4), 4, [1 / 4] * 4, id="window-full"),
        pytest.param(Averaging("window", window=4), 5, [0, 0, 1 / 3, 1 / 3, 1 / 3], id="window-other-sum"),
        pytest.param(Averaging("window", window=4), 6, [0, 0, 1 / 4, 1 / 4, 1 / 4, 1 / 4], id="window-other-full"),
        pytest.param(Averaging("window", window=4), 7, [0] * 4 + [1 / 3] * 3, id="window-first-again"),
        pytest.param(Averaging("window", window=3), 4, [0, 1 / 3, 1 / 3, 1 / 3], id="window-odd"),
        pytest.param(Averaging("window", window=2), 5, [0, 0, 0, 1 / 2, 1 / 2], id="window-of-two"),
    ],
)
def test_the_weight_of_every_model(rule: Averaging, rounds: int, expected: list[float] | None) -> None:
    """EMA without a bias at the start; a tail from its first round; a window of W/2 to W models."""
    assert weights(rule, rounds) == (expected if expected is None else pytest.approx(expected))


def test_a_window_has_half_to_all_of_its_models() -> None:
    """In every round once it is full."""
    counts = {mean.models for round_ in range(20, 200) if (mean := Averaging("window", window=20).mean(round_))}
    assert counts == set(range(11, 21))


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_change_no_bit(block: int) -> None:
    """A sum that is made block by block is the one that is made at once."""
    torch.manual_seed(0)
    x, before = torch.randn(201), torch.randn(201, dtype=torch.float64)
    rule = Averaging("ema", decay=0.9)
    [term] = rule.terms(3).values()
    mean = rule.mean(3)
    assert mean is not None
    whole = stepped(before.clone(), x, term)
    parts = [stepped(part, new, term) for part, new in zip(before.split(block), x.split(block), strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    averaged = [mean_of(part, mean, torch.float32) for part in whole.split(block)]
    assert torch.equal(torch.cat(averaged), mean_of(whole, mean, torch.float32))
