"""QG-server: quasi-global momentum with a server instead of gossip.

    client    d          = g + beta * mhat_t                       mhat_t is constant during the round
    server    mhat_{t+1} = mu * mhat_t + (1 - mu) * G_t            mhat_0 = 0
              x_{t+1}    = x_t + eta_g * Dbar
    with      G_t        = - sum_S p_i delta_i / (eta_l(t) * K_i)     with a schedule: sum_k eta_k in place of eta_l K_i

In QG-DSGDm with equal weights between all nodes, all x_i and all mhat_i are equal, so the server keeps one of each.
Unlike in FedCM, g keeps its full weight, and the server computes the moving average.

Lin, Karimireddy, Stich, Jaggi: Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data,
ICML 2021, algorithm 1 with W = 1/N.
"""

from __future__ import annotations

from collections.abc import Mapping

from algorithms import tree
from algorithms.base import ClientContext, LocalRule, Memory, RoundInfo, Tensors, Weights
from algorithms.client import required_direction
from algorithms.compose import GRADIENT_FROM_DELTA, Correction, Method, mean_delta_and_gradient
from algorithms.parameters import Decay, DecayPerRound


def qg(beta: DecayPerRound = 0.9, mu: Decay = 0.9, weights: Weights = "uniform") -> Method:
    """beta: weight of mhat in a local step, 0 is FedAvg; mu: share of mhat that the server keeps."""
    return Method(quasi_global(beta, mu), weights)


def quasi_global(beta: float, mu: float) -> Correction:
    """The correction of QG-server, for any server optimizer."""

    def local_rule(client: ClientContext) -> LocalRule:
        return LocalRule(u=tree.scale(required_direction(client, "the momentum mhat"), beta)) if beta else LocalRule()

    def advance(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        return sums["Dbar"], {"mhat": tree.lerp(memory["mhat"], sums["G"], 1.0 - mu)}

    return Correction(
        local_rule,
        {"mhat": 0.0},
        sends="mhat",
        sums=mean_delta_and_gradient,
        advance=advance,
        needs_sgd=GRADIENT_FROM_DELTA,
        needs_one_rate=False,
    )
