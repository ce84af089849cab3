"""FedAdagrad, FedYogi, FedAdam: adaptive server optimizers, with a learning rate for each parameter.

    client    d   = g
    server    m_t = beta1 * m_{t-1} + (1 - beta1) * Dbar                        m_{-1} = 0
              u   = Dbar^2, or m_t^2 with v_from = m (older text of the paper)
    Adagrad   v_t = v_{t-1} + u
    Yogi      v_t = v_{t-1} - (1 - beta2) * u * sign(v_{t-1} - u)
    Adam      v_t = beta2 * v_{t-1} + (1 - beta2) * u
              x_{t+1} = x_t + eta_g * m_t / (sqrt(v_t) + tau)                   v_{-1} = v0, by default tau^2

Squares, roots and quotients are element-wise. The paper asks for v_{-1} >= tau^2. Its program has v0 = 0; TFF has 1e-6
for Yogi and 0.1 for Adagrad. `bias_correction` is another common form of Adam and Yogi: v_{-1} is 0 unless v0 is given,
and in round t, with s = t + 1, the step is multiplied by sqrt(1 - beta2^s) / (1 - beta1^s), which leaves tau unscaled.

m is in units of the model's parameters and v in their squares. When eta_l decays, decay eta_g too, or set
`momentum_units = gradient`.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from algorithms import tree
from algorithms.base import Memory, RoundInfo, Tensors, Weights
from algorithms.compose import Correction, Method, ServerOptimizer
from algorithms.parameters import Decay, NonNegative, Positive, PositivePerRound

VFrom = Literal["delta", "m"]
Second = Callable[[Tensor, Tensor], Tensor]
"""(v, u) -> next v."""


def fedadagrad(weights: Weights = "examples") -> Method:
    """weights: by examples or uniform; the other parameters are those of `adagrad`."""
    return Method(Correction(), weights, adagrad)


def fedyogi(weights: Weights = "examples") -> Method:
    """weights: by examples or uniform; the other parameters are those of `yogi`."""
    return Method(Correction(), weights, yogi)


def fedadam(weights: Weights = "examples") -> Method:
    """weights: by examples or uniform; the other parameters are those of `adam`."""
    return Method(Correction(), weights, adam)


def adagrad(  # noqa: PLR0913, PLR0917 - the signature declares the parameters
    beta1: Decay = 0.0,
    tau: Positive = 1e-3,
    eta_g: PositivePerRound = 0.1,
    v_from: VFrom = "delta",
    v0: NonNegative | None = None,
) -> ServerOptimizer:
    """beta1: share of m that is kept (0 in the paper's experiments); tau: adaptivity; eta_g: server learning rate."""
    return _adaptive(_Moments(beta1, v_from, _start(v0, tau)), tau, lambda v, u: v + u, lambda s: eta_g)


def yogi(  # noqa: PLR0913, PLR0917 - the signature declares the parameters
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 1e-3,
    eta_g: PositivePerRound = 0.1,
    v_from: VFrom = "delta",
    bias_correction: bool = False,
    v0: NonNegative | None = None,
) -> ServerOptimizer:
    """beta1, beta2: shares of m and v that are kept; tau: adaptivity; eta_g: server learning rate."""

    def second(v: Tensor, u: Tensor) -> Tensor:
        return v - (1.0 - beta2) * u * torch.sign(v - u)

    if bias_correction:
        return _adaptive(_Moments(beta1, v_from, v0 or 0.0), tau, second, _corrected(beta1, beta2, eta_g))
    return _adaptive(_Moments(beta1, v_from, _start(v0, tau)), tau, second, lambda s: eta_g)


def adam(  # noqa: PLR0913, PLR0917 - the signature declares the parameters
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 1e-3,
    eta_g: PositivePerRound = 0.1,
    v_from: VFrom = "delta",
    bias_correction: bool = False,
    v0: NonNegative | None = None,
) -> ServerOptimizer:
    """beta1, beta2: shares of m and v that are kept; tau: adaptivity; eta_g: server learning rate."""

    def second(v: Tensor, u: Tensor) -> Tensor:
        return beta2 * v + (1.0 - beta2) * u

    if bias_correction:
        return _adaptive(_Moments(beta1, v_from, v0 or 0.0), tau, second, _corrected(beta1, beta2, eta_g))
    return _adaptive(_Moments(beta1, v_from, _start(v0, tau)), tau, second, lambda s: eta_g)


@dataclass(frozen=True, slots=True)
class _Moments:
    """Initial value and source of the moments m and v."""

    beta1: float
    v_from: VFrom
    v_start: float


def _start(v0: float | None, tau: float) -> float:
    """v_{-1} without bias correction: tau^2 unless it is given."""
    return tau**2 if v0 is None else v0


def _adaptive(moments: _Moments, tau: float, second: Second, rate: Callable[[int], float]) -> ServerOptimizer:
    """The common part of all three. rate: s = t + 1 -> server learning rate of round t."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        m = tree.lerp(memory["m"], movement, 1.0 - moments.beta1)
        source = movement if moments.v_from == "delta" else m
        v = tree.map(lambda v, g: second(v, g.square()), memory["v"], source)
        ratio = tree.map(lambda m, v: m / (v.sqrt() + tau), m, v)
        return tree.add(x, ratio, rate(round_info.round + 1)), {"m": m, "v": v}

    return ServerOptimizer(step, memory={"m": 0.0, "v": moments.v_start}, units={"m": 1, "v": 2})


def _corrected(beta1: float, beta2: float, eta_g: float) -> Callable[[int], float]:
    return lambda s: eta_g * math.sqrt(1.0 - beta2**s) / (1.0 - beta1**s)
