"""FedAvgM: the server remembers where the mean of the clients has been going.

    client      d       = g
    server      v_{t+1} = beta * v_t + Dbar                          v_0 = 0, without a factor 1 - beta
    heavy ball  x_{t+1} = x_t + eta_g * v_{t+1}
    Nesterov    x_{t+1} = x_t + eta_g * (Dbar + beta * v_{t+1})      what the paper ran

v is in units of the model's parameters: when eta_l decays, v stays as long as the old steps were. With
`momentum_units = gradient` it is multiplied by eta_l(t) / eta_l(t-1) first.

The Nesterov form is also FedMom of Huo et al.:  z+ = x + eta_g Dbar,  x+ = z+ + beta (z+ - z).

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, arXiv
1909.06335.
"""

from __future__ import annotations

from typing import Literal

from algorithms import tree
from algorithms.base import Memory, RoundInfo, Tensors, Weights
from algorithms.compose import Correction, Method, ServerOptimizer
from algorithms.parameters import Decay, Positive


def fedavgm(variant: Literal["nesterov", "heavy_ball"] = "nesterov", weights: Weights = "examples") -> Method:
    """variant: how x follows v; beta and eta_g are those of the server optimizer."""
    return Method(Correction(), weights, nesterov if variant == "nesterov" else heavy_ball)


def heavy_ball(beta: Decay = 0.9, eta_g: Positive = 1.0) -> ServerOptimizer:
    """v <- beta * v + movement,  x <- x + eta_g * v. beta: how much of v is kept; eta_g: server learning rate."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        v = tree.accumulate(memory["v"], beta, movement)
        return tree.add(x, v, eta_g), {"v": v}

    return ServerOptimizer(step, memory={"v": 0.0}, units={"v": 1})


def nesterov(beta: Decay = 0.9, eta_g: Positive = 1.0) -> ServerOptimizer:
    """v <- beta * v + movement,  x <- x + eta_g * (movement + beta * v)."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        v = tree.accumulate(memory["v"], beta, movement)
        return tree.add(x, tree.accumulate(v, beta, movement), eta_g), {"v": v}

    return ServerOptimizer(step, memory={"v": 0.0}, units={"v": 1})
