"""FedDemon and FedDemonAdam: server momentum that decays to zero by the end of the run.

    beta_s = beta0 (1 - s/T) / ((1 - beta0) + beta0 (1 - s/T))       s = t + 1 = 1..T,  beta_T = 0

    client        d <- g
    FedDemon      v <- beta_s * v + Dbar                             v_0 = 0
                  x <- x + eta_g * v
    FedDemonAdam  m <- beta_s * m + Dbar                             m_0 = v_0 = 0, no bias correction of m
                  v <- beta2 * v + (1 - beta2) * Dbar^2,   vhat = v / (1 - beta2^s)
                  x <- x + eta_g * m / sqrt(vhat + eps)              by element

T is the run's planned number of rounds: a resumed run keeps it, and later rounds have beta_s = 0. As m has no factor
1 - beta, its gain falls from about 1 / (1 - beta0) to 1. `eps_inside = false` is the older Demon-Adam, with eps outside
the root. The paper's FedDemon has eta_g = 1.

Fernandes et al., algorithms 2 and 3. They apply on the server the momentum decay of Chen, Wolfe, Li, Kyrillidis: Demon:
Improved Neural Network Training with Momentum Decay, ICASSP 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms import tree
from algorithms.base import Memory, RoundInfo, Tensors, Weights
from algorithms.compose import Correction, Method, ServerOptimizer
from algorithms.parameters import Decay, Positive, PositivePerRound


def feddemon(weights: Weights = "examples") -> Method:
    """weights: by examples or uniform; beta0 and eta_g are those of `demon`."""
    return Method(Correction(), weights, demon)


def feddemonadam(weights: Weights = "examples") -> Method:
    """weights: by examples or uniform; the other parameters are those of `demon_adam`."""
    return Method(Correction(), weights, demon_adam)


def demon(beta0: Decay = 0.9, eta_g: PositivePerRound = 1.0) -> ServerOptimizer:
    """v <- beta_s * v + movement,  x <- x + eta_g * v. beta0: share of v that is kept at the start."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        v = tree.accumulate(memory["v"], decayed_momentum(beta0, round_info), movement)
        return tree.add(x, v, eta_g), {"v": v}

    return ServerOptimizer(step, memory={"v": 0.0}, units={"v": 1})


def demon_adam(  # noqa: PLR0913, PLR0917 - the signature declares the parameters
    beta0: Decay = 0.9,
    beta2: Decay = 0.999,
    eta_g: PositivePerRound = 0.01,
    eps: Positive = 1e-8,
    eps_inside: bool = True,
) -> ServerOptimizer:
    """beta0, beta2: shares of m and v that are kept; eta_g: server learning rate; eps: inside or outside the root."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        m = tree.accumulate(memory["m"], decayed_momentum(beta0, round_info), movement)
        v = tree.map(lambda v, g: beta2 * v + (1.0 - beta2) * g.square(), memory["v"], movement)
        unbias = 1.0 / (1.0 - beta2 ** (round_info.round + 1))

        def ratio(m: Tensor, v: Tensor) -> Tensor:
            vhat = v * unbias
            return m / (torch.sqrt(vhat + eps) if eps_inside else torch.sqrt(vhat) + eps)

        return tree.add(x, tree.map(ratio, m, v), eta_g), {"m": m, "v": v}

    return ServerOptimizer(step, memory={"m": 0.0, "v": 0.0}, units={"m": 1, "v": 2})


def decayed_momentum(beta0: float, round_info: RoundInfo) -> float:
    """beta_s; 0 from s = T on. Raises ValueError without T."""
    left = max(0.0, 1.0 - (round_info.round + 1) / round_info.need("rounds"))
    return beta0 * left / ((1.0 - beta0) + beta0 * left)
