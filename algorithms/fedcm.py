"""FedCM: every local step is mixed with the direction that all clients went in the round before.

    client    d           = alpha * g + (1 - alpha) * Delta_t              Delta_t stays as it is during the round
    server    Delta_{t+1} = G_t = - sum_S p_i delta_i / (eta_l(t) * K_i)   Delta_0 = 0
              x_{t+1}     = x_t + eta_g * Dbar,     Dbar = sum_S p_i delta_i

alpha is the share of the LOCAL gradient: alpha = 1 is FedAvg. (Some programs call 1 - alpha by that name.) Delta is in
units of a gradient: each delta_i is divided by its own K_i and by the rate that produced it, so that unequal work and
a decaying rate do not change its scale, and lemma 4.1 holds: it is the moving average of the gradients the clients saw,

    Delta_{t+1} = sum_{s<=t} alpha (1 - alpha)^(t-s) gbar_s,     gbar_s = sum_i p_i (1/K_i) sum_k g_{i,k}

As Delta_0 = 0, the steps of round 0 are alpha times as long. Clients keep nothing; those that sit out miss nothing.

Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-level Momentum, arXiv 2106.10874, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from algorithms import tree
from algorithms.base import LocalRule, RoundInfo, Tensors, UpdateInfo, WeightedSum, Weights
from algorithms.compose import Correction, Memory, Method
from algorithms.parameters import AlgorithmError, Positive, Share
from algorithms.sgd import sgd


def fedcm(alpha: Share = 0.1, eta_g: Positive = 1.0, weights: Weights = "uniform") -> Method:
    """alpha: the local share; eta_g: server learning rate; weights: p_i uniform, as in the paper, or by examples."""
    return Method(client_momentum(alpha), sgd(eta_g), weights)


def client_momentum(alpha: float) -> Correction:
    """The correction of FedCM, for any server optimizer."""

    def local_rule(Delta: Tensors | None) -> LocalRule:
        if alpha == 1.0:
            return LocalRule()
        if Delta is None:
            raise AlgorithmError(
                "expected the momentum Delta beside the model, got none; fetch the round's direction too"
            )
        return LocalRule(a=alpha, u=tree.scale(Delta, 1.0 - alpha))

    return Correction(local_rule, memory={"Delta": 0.0}, sends="Delta", sums=_sums, advance=_advance)


def _sums(p: tuple[float, ...], cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Mapping[str, WeightedSum]:
    eta_l = round_info.learning_rate
    G = tuple(-p_i / (eta_l * client.num_steps) for p_i, client in zip(p, cohort, strict=True))
    return {"Dbar": WeightedSum(p), "G": WeightedSum(G)}


def _advance(memory: Memory, sums: Mapping[str, Tensors]) -> tuple[Tensors, Memory]:
    del memory
    return sums["Dbar"], {"Delta": sums["G"]}
