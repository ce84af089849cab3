"""An attack on the private steps of a device: examples that nothing else resembles are looked for in its update."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl
from algorithms.client import LocalData, Work, answer
from algorithms.privacy import dp_sgd
from algorithms.privacy.random_bits import normals
from fl_client.training.private import Applied, PrivateWork
from fl_common.privacy.accountant import epsilon_of
from fl_common.privacy.secret_stream import derived
from fl_tasks import Examples
from fl_tasks.batches import poisson_batches

CANARIES, UPDATES, STEPS = 1500, 3, 4
NOISE, CLIP, RATE, DELTA = 1.5, 0.5, 0.5, 0.01
SAMPLES = CANARIES * UPDATES


def work(update: int) -> PrivateWork:
    """The private steps of an update, with a secret of its own."""
    key = derived(bytes(32), "canary", update)
    return PrivateWork(Applied(NOISE, CLIP, DELTA), RATE, CANARIES, STEPS, b"", key)


def scores() -> tuple[Tensor, Tensor]:
    """How much the update moved along the gradients of canaries that are in the data, and of as many that are not.

    Each has a coordinate of its own, so noise and draws of one say nothing about another: all are independent.
    """
    there, absent = [], []
    for update in range(UPDATES):
        mine = work(update)
        examples = Examples(torch.eye(CANARIES, 2 * CANARIES), torch.zeros(CANARIES))
        model = nn.Linear(2 * CANARIES, 1, bias=False)
        data = LocalData(
            poisson_batches(examples, mine.draws()), (), lambda output, _: -1e3 * output.sum(), privacy=mine.privacy()
        )
        sent = answer(model, data, Work(fl.build("fedavg"), fl.ClientContext(), fl.LocalSettings(1.0)))
        moved = sent.payloads["delta"]["weight"][0]
        there.append(moved[:CANARIES])
        absent.append(moved[CANARIES:])
    return torch.cat(there), torch.cat(absent)


def lower_bound(there: Tensor, absent: Tensor) -> float:
    """The largest log((TPR - delta) / FPR) of a threshold, with rates that hold at 95 % (Dvoretzky, Kiefer, Wolfowitz).

    Their inequality holds for all thresholds at once; it is used twice.
    """
    slack = math.sqrt(math.log(4 / 0.05) / (2 * SAMPLES))
    best = 0.0
    for threshold in torch.linspace(float(absent.min()), float(there.max()), 200):
        hit = (there > threshold).double().mean().item() - slack
        false = (absent > threshold).double().mean().item() + slack
        if hit > DELTA:
            best = max(best, math.log((hit - DELTA) / false))
    return best


def test_a_canary_is_told_from_none_as_seldom_as_promised() -> None:
    """The bound from the attack's errors is under the account's epsilon, and the attack finds something."""
    promised = epsilon_of({work(0).mechanism: STEPS}, DELTA)
    assert 0.3 < lower_bound(*scores()) <= promised


@pytest.mark.parametrize("share", [0.0, 0.25], ids=["no noise", "a quarter of the noise"])
def test_a_canary_shows_that_noise_is_missing(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """With noise left out the bound is over what the account promises."""
    monkeypatch.setattr(dp_sgd, "normals", lambda *arguments: share * normals(*arguments))
    promised = epsilon_of({work(0).mechanism: STEPS}, DELTA)
    assert lower_bound(*scores()) > promised
