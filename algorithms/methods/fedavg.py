"""FedAvg: local SGD on the clients, weighted averaging on the server.

    client    d       = g
    server    x_{t+1} = x_t + eta_g * Dbar,     Dbar = sum_S p_i delta_i

With eta_g = 1 the next model is the weighted mean of the clients' models. Unequal K_i reweight the clients implicitly:
the fixed point moves towards those with more steps. `normaliser = fednova` corrects this.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, algorithm 1.
"""

from __future__ import annotations

from algorithms import tree
from algorithms.base import Memory, RoundInfo, Tensors, Weights
from algorithms.compose import Correction, Method, ServerOptimizer
from algorithms.parameters import PositivePerRound


def fedavg(weights: Weights = "examples") -> Method:
    """weights: p_i by examples, as in the paper, or uniform."""
    return Method(Correction(), weights)


def sgd(eta_g: PositivePerRound = 1.0) -> ServerOptimizer:
    """x_{t+1} = x_t + eta_g * movement."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        return tree.add(x, movement, eta_g), memory

    return ServerOptimizer(step)
