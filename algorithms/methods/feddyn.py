"""FedDyn: a linear and a proximal term in each client's objective, so that all clients converge to one minimiser.

    client    d   = g - h_i + alpha * (y - x_t)              h_i stays with the client
              h_i <- h_i - alpha * delta_i                   h_0 = h_i = 0
    server    h   <- h - (alpha/N) sum_S delta_i             N, not |S|
              x   <- mean_S y_i - h/alpha                    movement of the optimizer:  mean_S delta_i - h/alpha

h must be the mean of all N duals h_i at every commit, or the method stops short of the optimum. So a client computes
its state from its delta as admitted, only for rounds that counted, and N is fixed. The local work should nearly solve
the local problem: after too few steps h_i does not approximate a gradient.

With `objective = examples` the minimised objective is sum_i n_i f_i: a client replaces alpha by alpha / omega_i, with
omega_i = N n_i / sum n, and the server rule is unchanged. h is then the mean of omega_i h_i.

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
from algorithms.client import required_payload, required_state
from algorithms.compose import ClientState, ClientWeights, Correction, Method, Sums
from algorithms.parameters import Positive
from algorithms.precision import widened


def feddyn(alpha: Positive = 0.1, objective: Objective = "uniform") -> Method:
    """alpha: strength of the proximal term; objective: the mean of f_i, over clients or over examples."""
    return Method(dynamic_regularizer(alpha, objective), "uniform")


def dynamic_regularizer(alpha: float, objective: Objective) -> Correction:
    """The correction of FedDyn, for any server optimizer."""

    def local_rule(client: ClientContext) -> LocalRule:
        return LocalRule(u=tree.scale(required_state(client, "h_i"), -1.0), mu=alpha / client.omega)

    def next_state(client: ClientContext, update: ClientUpdate) -> Memory:
        delta = widened(required_payload(update, "delta"))
        return {"h_i": tree.add(required_state(client, "h_i"), delta, -alpha / client.omega)}

    def sums(p: ClientWeights, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
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
        needs_sgd="h_i <- h_i - alpha delta_i is a gradient at y only after steps of plain SGD on the same objective",
        incompatible={"fednova": "h and the mean of the models must use the same sum of deltas"},
    )
