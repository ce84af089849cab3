"""SlowMo: server momentum in units of a gradient.

    client    d       = g
    server    u_{t+1} = beta * u_t - Dbar / eta_l(t)                 u_0 = 0
              x_{t+1} = x_t - eta_g * eta_l(t) * u_{t+1}

eta_g is the paper's slow learning rate alpha. Each Dbar is divided by its own eta_l, so that u keeps its meaning when
eta_l decays. With constant eta_l this is FedAvgM's heavy ball.

Wang, Tantia, Ballas, Rabbat: SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum, ICLR 2020,
algorithm 1.
"""

from __future__ import annotations

from algorithms import tree
from algorithms.base import Memory, RoundInfo, Tensors, Weights
from algorithms.compose import Correction, Method, ServerOptimizer
from algorithms.parameters import Decay, PositivePerRound


def slowmo(weights: Weights = "uniform") -> Method:
    """weights: uniform, as in the paper, or by examples; beta and eta_g are those of `slow_momentum`."""
    return Method(Correction(), weights, slow_momentum)


def slow_momentum(beta: Decay = 0.5, eta_g: PositivePerRound = 1.0) -> ServerOptimizer:
    """u <- beta * u - movement / eta_l,  x <- x - eta_g * eta_l * u. beta: share of u that is kept."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        eta_l = round_info.learning_rate
        u = tree.accumulate(memory["u"], beta, tree.scale(movement, -1.0 / eta_l))
        return tree.add(x, u, -eta_g * eta_l), {"u": u}

    return ServerOptimizer(step, memory={"u": 0.0})
