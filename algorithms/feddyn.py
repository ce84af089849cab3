"""FedDyn: each client's objective gets a linear and a proximal term, so that all have one minimiser in the end.

    client    d   = g - h_i + alpha * (y - x_t)              h_i stays with the client
              h_i <- h_i - alpha * delta_i                   h_0 = h_i = 0
    server    h   <- h - (alpha/N) sum_S delta_i             N, not |S|
              x   <- mean_S y_i - h/alpha                    the optimizer is fed with  mean_S delta_i - h/alpha

h is the mean of all N duals at every commit, else the method stops short of the optimum: so a client's state is made
from its delta as admitted, only of rounds that counted, and N does not change. It wants local work that nearly solves
the local problem; with few steps h_i is no gradient.

With `objective = examples` the minimiser is that of sum_i n_i f_i: a client takes alpha / omega_i for alpha, with
omega_i = N n_i / sum n, and the server stays as it is; h is then the mean of omega_i h_i.

Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization, ICLR 2021,
algorithm 1. The authors' program keeps b_i = -h_i / alpha.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from algorithms import tree
from algorithms.base import (
    ClientContext,
    ClientUpdate,
    LocalRule,
    Memory,
    Objective,
    RoundInfo,
    Tensors,
    UpdateInfo,
    WeightedSum,
)
from algorithms.client import kept
from algorithms.compose import ClientState, Correction, Method, Shares, Sums
from algorithms.parameters import Positive


def feddyn(alpha: Positive = 0.1, objective: Objective = "uniform") -> Method:
    """alpha: strength of the proximal term; objective: the mean of f_i, over clients or over examples."""
    return Method(dynamic_regularizer(alpha, objective), "uniform")


def dynamic_regularizer(alpha: float, objective: Objective) -> Correction:
    """The correction of FedDyn, for any server optimizer."""

    def local_rule(client: ClientContext) -> LocalRule:
        return LocalRule(u=tree.scale(kept(client, "h_i"), -1.0), mu=alpha / client.omega)

    def next_state(client: ClientContext, update: ClientUpdate) -> Memory:
        return {"h_i": tree.add(kept(client, "h_i"), update.payloads["delta"], -alpha / client.omega)}

    def sums(p: Shares, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
        share = -alpha / round_info.need("population")
        return {"Dbar": WeightedSum(p), "H": WeightedSum((share,) * len(cohort))}

    def advance(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
        del round_info
        h = tree.add(memory["h"], sums["H"])
        return tree.add(sums["Dbar"], h, -1.0 / alpha), {"h": h}

    return Correction(
        local_rule,
        memory={"h": 0.0},
        sums=sums,
        advance=advance,
        client=ClientState(("h_i",), next_state),
        objective=objective,
        needs_population=True,
        refuses={"fednova": "h and the mean of the models must be made from one and the same sum of deltas"},
    )
