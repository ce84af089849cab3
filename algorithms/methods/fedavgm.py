"""FedAvgM: momentum on the server.

    client      d       = g
    server      v_{t+1} = beta * v_t + Dbar                          v_0 = 0, without a factor 1 - beta
    heavy ball  x_{t+1} = x_t + eta_g * v_{t+1}
    Nesterov    x_{t+1} = x_t + eta_g * (Dbar + beta * v_{t+1})      what the paper ran

v is in units of the model's parameters: when eta_l decays, v still has the scale of the earlier, longer steps. With
`momentum_units = gradient` it is first multiplied by eta_l(t) / eta_l(t-1).

The Nesterov form is also FedMom of Huo et al.:  z+ = x + eta_g Dbar,  x+ = z+ + beta (z+ - z).

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, arXiv
1909.06335.
"""

from __future__ import annotations

from typing import Literal

from algorithms import tree
from algorithms.base import Memory, RoundInfo, Tensors, Weights
from algorithms.compose import Correction, Method, ServerOptimizer
from algorithms.parameters import Decay, PositivePerRound


def fedavgm(variant: Literal["nesterov", "heavy_ball"] = "nesterov", weights: Weights = "examples") -> Method:
    """variant: form of the momentum; weights: by examples or uniform. The other parameters are the optimizer's."""
    return Method(Correction(), weights, nesterov if variant == "nesterov" else heavy_ball)


def heavy_ball(beta: Decay = 0.9, eta_g: PositivePerRound = 1.0) -> ServerOptimizer:
    """v <- beta * v + movement,  x <- x + eta_g * v. beta: share of v that is kept; eta_g: server learning rate."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        v = tree.accumulate(memory["v"], beta, movement)
        return tree.add(x, v, eta_g), {"v": v}

    return ServerOptimizer(step, memory={"v": 0.0}, units={"v": 1})


def nesterov(beta: Decay = 0.9, eta_g: PositivePerRound = 1.0) -> ServerOptimizer:
    """v <- beta * v + movement,  x <- x + eta_g * (movement + beta * v)."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        v = tree.accumulate(memory["v"], beta, movement)
        return tree.add(x, tree.accumulate(v, beta, movement), eta_g), {"v": v}

    return ServerOptimizer(step, memory={"v": 0.0}, units={"v": 1})
