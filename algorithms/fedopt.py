"""FedAdagrad, FedYogi, FedAdam: each parameter of the server model moves at a rate of its own.

    client    d   = g
    server    m_t = beta1 * m_{t-1} + (1 - beta1) * Dbar                        m_{-1} = 0
              u   = Dbar^2, or m_t^2 with v_from = m (older text of the paper)
    Adagrad   v_t = v_{t-1} + u
    Yogi      v_t = v_{t-1} - (1 - beta2) * u * sign(v_{t-1} - u)
    Adam      v_t = beta2 * v_{t-1} + (1 - beta2) * u
              x_{t+1} = x_t + eta_g * m_t / (sqrt(v_t) + tau)                   v_{-1} = tau^2

Squares, roots and quotients are by element. `bias_correction` is the other reading of Adam and Yogi in use: v_{-1} = 0,
and in round t, with s = t + 1, the step is longer by sqrt(1 - beta2^s) / (1 - beta1^s), tau outside of it.

m is in units of the model's parameters and v in their squares: when eta_l decays, decay eta_g too, or take
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
from algorithms.parameters import Decay, Positive

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


def adagrad(
    beta1: Decay = 0.0, tau: Positive = 1e-3, eta_g: Positive = 0.1, v_from: VFrom = "delta"
) -> ServerOptimizer:
    """beta1: how much of m is kept (0 in the experiments); tau: how adaptive; eta_g: server learning rate."""
    return _adaptive(_Moments(beta1, v_from), tau, lambda v, u: v + u, lambda s: eta_g)


def yogi(  # noqa: PLR0913, PLR0917 - an optimizer's parameters are its signature
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 1e-3,
    eta_g: Positive = 0.1,
    v_from: VFrom = "delta",
    bias_correction: bool = False,
) -> ServerOptimizer:
    """beta1, beta2: how much of m and v is kept; tau: how adaptive; eta_g: server learning rate."""

    def second(v: Tensor, u: Tensor) -> Tensor:
        return v - (1.0 - beta2) * u * torch.sign(v - u)

    if bias_correction:
        return _adaptive(_Moments(beta1, v_from, v_start=0.0), tau, second, _corrected(beta1, beta2, eta_g))
    return _adaptive(_Moments(beta1, v_from), tau, second, lambda s: eta_g)


def adam(  # noqa: PLR0913, PLR0917 - an optimizer's parameters are its signature
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 1e-3,
    eta_g: Positive = 0.1,
    v_from: VFrom = "delta",
    bias_correction: bool = False,
) -> ServerOptimizer:
    """beta1, beta2: how much of m and v is kept; tau: how adaptive; eta_g: server learning rate."""

    def second(v: Tensor, u: Tensor) -> Tensor:
        return beta2 * v + (1.0 - beta2) * u

    if bias_correction:
        return _adaptive(_Moments(beta1, v_from, v_start=0.0), tau, second, _corrected(beta1, beta2, eta_g))
    return _adaptive(_Moments(beta1, v_from), tau, second, lambda s: eta_g)


@dataclass(frozen=True, slots=True)
class _Moments:
    """How m and v begin and what they are made of."""

    beta1: float
    v_from: VFrom
    v_start: float | None = None
    """None: tau^2."""


def _adaptive(moments: _Moments, tau: float, second: Second, rate: Callable[[int], float]) -> ServerOptimizer:
    """What the three share; `rate` gives the server learning rate of round t from s = t + 1."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        m = tree.lerp(memory["m"], movement, 1.0 - moments.beta1)
        source = movement if moments.v_from == "delta" else m
        v = tree.map(lambda v, g: second(v, g.square()), memory["v"], source)
        ratio = tree.map(lambda m, v: m / (v.sqrt() + tau), m, v)
        return tree.add(x, ratio, rate(round_info.round + 1)), {"m": m, "v": v}

    start = tau**2 if moments.v_start is None else moments.v_start
    return ServerOptimizer(step, memory={"m": 0.0, "v": start}, units={"m": 1, "v": 2})


def _corrected(beta1: float, beta2: float, eta_g: float) -> Callable[[int], float]:
    return lambda s: eta_g * math.sqrt(1.0 - beta2**s) / (1.0 - beta1**s)
