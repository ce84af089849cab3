"""MimeLite and Mime: clients apply the server's momentum, which is computed from full gradients at x_t.

    MimeLite  d       = (1 - beta) * g + beta * m_t
    Mime      d       = (1 - beta) * (g(y; batch) - g(x_t; batch) + cbar) + beta * m_t
    server    x_{t+1} = x_t + eta_g * Dbar
              m_{t+1} = (1 - beta) * cbar + beta * m_t                 m_0 = 0
    with      cbar    = sum_S p_i g_i(x_t), over the whole local sets

MimeLite's clients send g_i(x_t) with their delta. Mime needs cbar before the steps, so its round has two exchanges: the
first sends x_t and collects g_i(x_t), the second sends m_{t+1}, for  d = (1 - beta) * (g(y) - g(x_t)) + m_{t+1}.

With beta = 0, MimeLite is FedAvg and Mime is FedDANE without its proximal term. `damp = false` omits both factors
1 - beta, as several programs do, so that the effective rate is 1 / (1 - beta) times larger.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Breaking the Centralized Barrier for Cross-Device Federated
Learning, NeurIPS 2021, algorithm 1 with momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from algorithms import tree
from algorithms.base import ClientContext, LocalRule, Memory, RoundInfo, Tensors, UpdateInfo, WeightedSum, Weights
from algorithms.client import required_direction
from algorithms.compose import ClientWeights, Correction, Method, PreparatoryExchange, Sums
from algorithms.parameters import DecayPerRound


def mimelite(beta: DecayPerRound = 0.9, damp: bool = True, weights: Weights = "uniform") -> Method:
    """beta: share of the momentum; damp: multiply gradients by 1 - beta; weights: uniform or by examples."""
    a = 1.0 - beta if damp else 1.0

    def local_rule(client: ClientContext) -> LocalRule:
        return LocalRule(a=a, u=tree.scale(required_direction(client, "the momentum m"), beta)) if beta else LocalRule()

    def sums(p: ClientWeights, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
        return {"Dbar": WeightedSum(p), **_mean_gradient(p, cohort, round_info)}

    correction = Correction(
        local_rule, {"m": 0.0}, sends="m", payloads=("delta", "full_gradient"), sums=sums, advance=_advance(beta, a)
    )
    return Method(correction, weights)


def mime(beta: DecayPerRound = 0.9, damp: bool = True, weights: Weights = "uniform") -> Method:
    """The method `mimelite` with g(y) - g(x_t) + cbar for g(y)."""
    a = 1.0 - beta if damp else 1.0

    def local_rule(client: ClientContext) -> LocalRule:
        return LocalRule(a=a, u=required_direction(client, "the next momentum m"), anchored=True)

    def direction(memory: Memory, sums: Mapping[str, Tensors]) -> Tensors:
        return _next_momentum(memory, sums, beta, a)

    correction = Correction(
        local_rule,
        {"m": 0.0},
        preparation=PreparatoryExchange(("full_gradient",), _mean_gradient, direction),
        advance=_advance(beta, a),
        incompatible={"sam": "the gradient g(x; batch) would need an ascent of its own, which no paper defines"},
    )
    return Method(correction, weights)


def _mean_gradient(p: ClientWeights, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
    """cbar."""
    del cohort, round_info
    return {"cbar": WeightedSum(p, "full_gradient")}


def _next_momentum(memory: Memory, sums: Mapping[str, Tensors], beta: float, a: float) -> Tensors:
    cbar = sums["cbar"] if a == 1.0 else tree.scale(sums["cbar"], a)
    return tree.accumulate(memory["m"], beta, cbar)


def _advance(beta: float, a: float) -> Callable[[Memory, Mapping[str, Tensors], RoundInfo], tuple[Tensors, Memory]]:
    def advance(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        return sums["Dbar"], {"m": _next_momentum(memory, sums, beta, a)}

    return advance
