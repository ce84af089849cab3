"""MFL: clients run a heavy ball from the server's model and momentum, and the server averages both.

    client    v <- gamma * v + g,   y <- y - eta_l * v         from y = x_t, v = u_t
    server    x_{t+1} = x_t + eta_g * Dbar
              u_{t+1} = sum_S p_i v_i                          u_0 = 0

Two bundles go down, two come up. gamma = 0 is FedAvg.

Liu, Chen, Chen, Zhang: Accelerating Federated Learning via Momentum Gradient Descent, IEEE TPDS 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from algorithms.base import ClientContext, LocalRule, Memory, RoundInfo, Tensors, UpdateInfo, WeightedSum, Weights
from algorithms.client import sent
from algorithms.compose import Correction, Method, Shares, Sums
from algorithms.parameters import Decay


def mfl(gamma: Decay = 0.9, weights: Weights = "examples") -> Method:
    """gamma: how much of v is kept from step to step; weights: by examples, as in the paper, or uniform."""

    def local_rule(client: ClientContext) -> LocalRule:
        return LocalRule(v=sent(client, "the momentum u"), gamma=gamma)

    correction = Correction(
        local_rule,
        {"u": 0.0},
        sends="u",
        payloads=("delta", "client_momentum"),
        sums=_sums,
        advance=_advance,
        refuses={
            "fednova": "how far a delta reaches depends on the momentum that it started from",
        },
    )
    return Method(correction, weights)


def _sums(p: Shares, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
    del cohort, round_info
    return {"Dbar": WeightedSum(p), "u": WeightedSum(p, "client_momentum")}


def _advance(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
    del memory, round_info
    return sums["Dbar"], {"u": sums["u"]}
