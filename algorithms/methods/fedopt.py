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
    return _Adaptive(beta1, tau, eta_g, v_from, v0).optimizer(lambda v, u: v + u)


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
    common = _Adaptive(beta1, tau, eta_g, v_from, v0, beta2 if bias_correction else None)
    return common.optimizer(lambda v, u: v - (1.0 - beta2) * u * torch.sign(v - u))


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
    common = _Adaptive(beta1, tau, eta_g, v_from, v0, beta2 if bias_correction else None)
    return common.optimizer(lambda v, u: beta2 * v + (1.0 - beta2) * u)


@dataclass(frozen=True, slots=True)
class _Adaptive:
    """The common part of all three."""

    beta1: float
    tau: float
    eta_g: float
    v_from: VFrom
    v0: float | None
    corrected: float | None = None
    """beta2 with bias correction; None without."""

    @property
    def start(self) -> float:
        """v_{-1}."""
        usual = self.tau**2 if self.corrected is None else 0.0
        return usual if self.v0 is None else self.v0

    def rate(self, s: int) -> float:
        """The server learning rate of round s - 1."""
        if self.corrected is None:
            return self.eta_g
        return self.eta_g * math.sqrt(1.0 - self.corrected**s) / (1.0 - self.beta1**s)

    def optimizer(self, second: Second) -> ServerOptimizer:
        """With this rule for v."""

        def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
            m = tree.lerp(memory["m"], movement, 1.0 - self.beta1)
            source = movement if self.v_from == "delta" else m
            v = tree.map(lambda v, g: second(v, g.square()), memory["v"], source)
            ratio = tree.map(lambda m, v: m / (v.sqrt() + self.tau), m, v)
            return tree.add(x, ratio, self.rate(round_info.round + 1)), {"m": m, "v": v}

        return ServerOptimizer(step, memory={"m": 0.0, "v": self.start}, units={"m": 1, "v": 2})
