"""FedCM: each local step mixes the local gradient with the mean direction of all clients in the previous round.

    client    d           = alpha * g + (1 - alpha) * Delta_t              Delta_t is constant during the round
    server    Delta_{t+1} = G_t = - sum_S p_i delta_i / (eta_l(t) * K_i)   Delta_0 = 0
              x_{t+1}     = x_t + eta_g * Dbar,     Dbar = sum_S p_i delta_i

alpha is the share of the LOCAL gradient: alpha = 1 is FedAvg. (Some programs call 1 - alpha by that name.) Delta is in
units of a gradient: each delta_i is divided by its own K_i and by the rate that produced it, so that unequal work and
a decaying rate do not change its scale. With a schedule within the round, the divisor is sum_k eta_k, and a gradient's
weight is the rate of its step. So lemma 4.1 holds: Delta is the moving average of the clients' gradients,

    Delta_{t+1} = sum_{s<=t} alpha (1 - alpha)^(t-s) gbar_s,     gbar_s = sum_i p_i (1/K_i) sum_k g_{i,k}

With weight decay inside the mix, g includes wd * y, and a stationary Delta is the mean of these g. With
order = "feddyn_code", as in the authors' program, the decay is outside: Delta = alpha g + (1 - alpha) Delta + wd y is
stationary at g + (wd/alpha) y, so the effective decay is 1/alpha times that of FedAvg with the same wd.

As Delta_0 = 0, the steps of round 0 are alpha times as long. Clients have no state, so a skipped round has no effect.

Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-level Momentum, arXiv 2106.10874, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from algorithms import tree
from algorithms.base import ClientContext, LocalRule, Memory, RoundInfo, Tensors, Weights
from algorithms.client import required_direction
from algorithms.compose import GRADIENT_FROM_DELTA, Correction, Method, mean_delta_and_gradient
from algorithms.parameters import SharePerRound


def fedcm(alpha: SharePerRound = 0.1, weights: Weights = "uniform") -> Method:
    """alpha: the local share; weights: p_i uniform, as in the paper, or by examples."""
    return Method(client_momentum(alpha), weights)


def client_momentum(alpha: float) -> Correction:
    """The correction of FedCM, for any server optimizer."""

    def local_rule(client: ClientContext) -> LocalRule:
        if alpha == 1.0:
            return LocalRule()
        return LocalRule(a=alpha, u=tree.scale(required_direction(client, "the momentum Delta"), 1.0 - alpha))

    return Correction(
        local_rule,
        memory={"Delta": 0.0},
        sends="Delta",
        sums=mean_delta_and_gradient,
        advance=_advance,
        needs_sgd=GRADIENT_FROM_DELTA,
        needs_one_rate=False,
        outer_decay_factor=1.0 / alpha,
    )


def _advance(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
    del memory, round_info
    return sums["Dbar"], {"Delta": sums["G"]}
