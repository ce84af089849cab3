"""SCAFFOLD: control variates take the clients' drift out of every local step.

    client     d    = g - c_i + c_t                                       c_i stays with the client, c comes down
    option I   c_i+ = g_i(x_t) over the whole local set                   up: delta_i and c_i+ - c_i
    option II  c_i+ = c_i - c_t - delta_i / (K_i * eta_l(t))              up: delta_i alone
    server     x_{t+1} = x_t + eta_g * mean_S delta_i
               c_{t+1} = c_t + (1/N) sum_S (c_i+ - c_i)                   c_0 = c_i = 0;  N, not |S|

c is the mean of all N variates at every commit, else the method stops short of the optimum: so a client's state is made
from its delta as admitted, only of rounds that counted, and N does not change. By option II c_i+ is the mean gradient
that the client saw, and the server makes the variates' change from the delta it has: one model up.

With `objective = examples` the minimiser is that of sum_i n_i f_i. With omega_i = N n_i / sum n a step has c / omega_i,
and c moves by omega_i times a client's change; c is then the mean of omega_i c_i.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
2020, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from algorithms import tree
from algorithms.aggregate import omega
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
from algorithms.client import kept, sent
from algorithms.compose import ClientState, Correction, Method, Shares, Sums


def scaffold(option: Literal["I", "II"] = "II", objective: Objective = "uniform") -> Method:
    """option: how c_i+ is made; objective: the mean of f_i, over clients or over examples."""
    return Method(control_variates(option, objective), "uniform")


def control_variates(option: Literal["I", "II"], objective: Objective) -> Correction:
    """The correction of SCAFFOLD, for any server optimizer."""

    def sums(p: Shares, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
        N, eta_l = round_info.need("population"), round_info.learning_rate
        if option == "I":
            row = WeightedSum(tuple(omega(objective, k, round_info) / N for k in cohort), "variate_change")
        else:
            row = WeightedSum(tuple(-omega(objective, k, round_info) / (N * eta_l * k.num_steps) for k in cohort))
        return {"Dbar": WeightedSum(p), "C": row}

    def advance(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
        moved = 0.0 if option == "I" else round_info.need("cohort_size") / round_info.need("population")
        return sums["Dbar"], {"c": tree.add(tree.scale(memory["c"], 1.0 - moved), sums["C"])}

    return Correction(
        _local_rule,
        memory={"c": 0.0},
        sends="c",
        payloads=("delta", "variate_change") if option == "I" else ("delta",),
        sums=sums,
        advance=advance,
        client=ClientState(("c_i",), _first_option if option == "I" else _second_option),
        objective=objective,
        needs_population=True,
    )


def _local_rule(client: ClientContext) -> LocalRule:
    return LocalRule(u=tree.subtract(_shared(client), kept(client, "c_i")))


def _first_option(client: ClientContext, update: ClientUpdate) -> Memory:
    """c_i + (g_i(x_t) - c_i), by the change that the server has."""
    return {"c_i": tree.add(kept(client, "c_i"), update.payloads["variate_change"])}


def _second_option(client: ClientContext, update: ClientUpdate) -> Memory:
    """c_i - c - delta_i / (K_i eta_l)."""
    c_i = tree.subtract(kept(client, "c_i"), _shared(client))
    return {"c_i": tree.add(c_i, update.payloads["delta"], -1.0 / (update.steps * update.learning_rate))}


def _shared(client: ClientContext) -> Tensors:
    """c / omega_i."""
    c = sent(client, "the control variate c")
    return c if client.omega == 1.0 else tree.scale(c, 1.0 / client.omega)
