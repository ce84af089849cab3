"""MFL: clients run heavy-ball momentum from the server's model and momentum, and the server averages both.

    client    v <- gamma * v + g,   y <- y - eta_l * v         from y = x_t, v = u_t
    server    x_{t+1} = x_t + eta_g * Dbar
              u_{t+1} = sum_S p_i v_i                          u_0 = 0

Model and momentum go in both directions. gamma = 0 is FedAvg.

Liu, Chen, Chen, Zhang: Accelerating Federated Learning via Momentum Gradient Descent, IEEE TPDS 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from algorithms.base import ClientContext, LocalRule, Memory, RoundInfo, Tensors, UpdateInfo, WeightedSum, Weights
from algorithms.client import required_direction
from algorithms.compose import ClientWeights, Correction, Method, Sums
from algorithms.parameters import Decay


def mfl(gamma: Decay = 0.9, weights: Weights = "examples") -> Method:
    """gamma: share of v that is kept from step to step; weights: by examples, as in the paper, or uniform."""

    def local_rule(client: ClientContext) -> LocalRule:
        return LocalRule(v=required_direction(client, "the momentum u"), gamma=gamma)

    correction = Correction(
        local_rule,
        {"u": 0.0},
        sends="u",
        payloads=("delta", "client_momentum"),
        sums=_sums,
        advance=_advance,
        own_steps="its local steps are those of heavy-ball momentum, whose buffer the server averages",
        no_loop="its clients send the momentum of their local steps, and a loop has none of them",
        incompatible={
            "fednova": "the size of a delta depends on the momentum that its training started with",
        },
    )
    return Method(correction, weights)


def _sums(p: ClientWeights, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
    del cohort, round_info
    return {"Dbar": WeightedSum(p), "u": WeightedSum(p, "client_momentum")}


def _advance(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
    del memory, round_info
    return sums["Dbar"], {"u": sums["u"]}
