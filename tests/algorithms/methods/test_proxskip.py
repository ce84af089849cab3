"""ProxSkip in numbers worked by hand, against a reference in the paper's own form, and its exact optimum."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import algorithms as fl
from algorithms.conformance.federation import Federation, Round, RunState, flat, parabolas, path, total
from tests.algorithms.optimum import minimiser


def test_by_hand() -> None:
    """b = 4 and b = -2, gamma = 0.5, p = 0.5, from x = 0, with 1 and then 2 steps.

    Round 0: yh = 2, -1, x = 0.5; h = 1 * (0.5 - 2) = -1.5, 1.5, as c_a = -0.5 * 2 / 0.5 = -2, c_b = 1, c = -0.5.
    Round 1: a: d = -3.5 + 1.5 = -2, y = 1.5; d = -1, y = 2, delta 1.5, c_a = -2 + 0.5 - 1.5 = -3.
             b: d = 2.5 - 1.5 = 1, y = 0; d = 0.5, y = -0.25, delta -0.75, c_b = 1 + 0.5 + 0.75 = 2.25.
             x = 0.5 + (1.5 - 0.75) / 2 = 0.875, c = -0.375.
    """
    proxskip, first, then = (
        fl.build("proxskip", p=0.5),
        parabolas(a=(4.0, 1), b=(-2.0, 1)),
        parabolas(a=(4.0, 2), b=(-2.0, 2)),
    )
    assert path(first, proxskip, [Round(0, [0, 1])], "c") == [(0.5, -0.5)]
    start = first.run(proxskip, [Round(0, [0, 1])])[-1]
    end = then.run(proxskip, [Round(1, [0, 1])], start)[-1]
    assert (flat(end.server.x)[0].item(), flat(end.server.memory["c"])[0].item()) == (0.875, -0.375)


def flips(p: float, rounds: int) -> list[bool]:
    """Coins of so many rounds, each thrown after a step: whether the clients communicate."""
    coins, thrown = random.Random(3), list[bool]()
    while sum(thrown) < rounds:
        thrown.append(coins.random() < p)
    return thrown


def steps_of(coins: list[bool]) -> list[int]:
    """The local steps of each round."""
    ends = [number + 1 for number, coin in enumerate(coins) if coin]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def paper(federation: Federation, p: float, coins: list[bool], gamma: float) -> Iterator[Tensor]:
    """x after each communication, with a coin after every step and the h_i of the paper."""
    clients, x = federation.clients, flat(federation.x)
    y, h = [x for _ in clients], [torch.zeros_like(x) for _ in clients]
    for coin in coins:
        ahead = [y_i - gamma * (k.gradient(y_i) - h_i) for k, y_i, h_i in zip(clients, y, h, strict=True)]
        y = ahead
        if coin:
            x = total(y_i - gamma / p * h_i for y_i, h_i in zip(ahead, h, strict=True)) / len(clients)
            y = [x for _ in clients]
            h = [h_i + p / gamma * (x - ahead_i) for h_i, ahead_i in zip(h, ahead, strict=True)]
            yield x


def played(federation: Federation, algorithm: fl.Algorithm, steps: list[int]) -> Iterator[RunState]:
    """The run after each round of so many steps."""
    state = federation.start(algorithm)
    for t, count in enumerate(steps):
        state = federation.with_steps(count).after(algorithm, state, Round(t))
        yield state


@pytest.mark.parametrize("p", [0.15, 0.5, 1.0])
def test_same_path_as_coin_flips_after_every_step(federation: Federation, p: float) -> None:
    """x of every round agrees to 1e-12 with the paper's own form in float64; c is the mean of all c_i."""
    coins = flips(p, 25)
    runs = played(federation, fl.build("proxskip", p=p), steps_of(coins))
    for state, x in zip(runs, paper(federation, p, coins, 0.1), strict=True):
        torch.testing.assert_close(flat(state.server.x), x, rtol=0, atol=1e-12)
        mean = total(flat(memory["c_i"]) for memory in state.clients.values()) / 3
        torch.testing.assert_close(flat(state.server.memory["c"]), mean, rtol=0, atol=1e-12)


def test_exact_optimum_of_different_clients(conditioned: Federation) -> None:
    """At a constant rate, with rounds of 1 to 30 steps, x is the minimiser of the mean of f_i to 1e-10."""
    steps = steps_of(flips(0.2, 150))
    assert (min(steps), max(steps) > 10) == (1, True)
    *_, end = played(conditioned, fl.build("proxskip", p=0.2), steps)
    torch.testing.assert_close(flat(end.server.x), minimiser(conditioned), rtol=0, atol=1e-10)


def test_communication_after_every_step_is_gradient_descent(federation: Federation) -> None:
    """p = 1: the corrections cancel in the mean, as with FedAvg of one step."""
    proxskip, fedavg = fl.build("proxskip", p=1), fl.build("fedavg", weights="uniform")
    one, other = (list(played(federation, algorithm, [1] * 6))[-1] for algorithm in (proxskip, fedavg))
    torch.testing.assert_close(one.server.x, other.server.x, rtol=0, atol=1e-12)


def test_with_p_of_a_fixed_period_it_is_scaffold(federation: Federation) -> None:
    """Rounds of exactly 1/p steps: the same bits as SCAFFOLD's option II."""
    ends = [
        list(played(federation, fl.build(name, **own), [4] * 5))[-1]
        for name, own in (("proxskip", {"p": 0.25}), ("scaffold", {}))
    ]
    assert torch.equal(*(flat(end.server.x) for end in ends))
