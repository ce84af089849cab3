"""SCAFFOLD: control variates correct the clients' drift in every local step.

    client     d    = g - c_i + c_t                                       c_i stays on the client, c is sent
    option I   c_i+ = g_i(x_t) over the whole local set                   sent: delta_i and c_i+ - c_i
    option II  c_i+ = c_i - c_t - delta_i / (K_i * eta_l(t))              sent: delta_i only
    server     x_{t+1} = x_t + eta_g * mean_S delta_i
               c_{t+1} = c_t + (1/N) sum_S (c_i+ - c_i)                   c_0 = c_i = 0;  N, not |S|

c must be the mean of all N variates at every commit, or the method stops short of the optimum. So a client computes its
state from its delta as admitted, only for rounds that counted, and N is fixed. With option II c_i+ is the mean gradient
of the client's steps, and the server computes the variates' change from the delta.

With `objective = examples` the minimised objective is sum_i n_i f_i. With omega_i = N n_i / sum n, a step uses
c / omega_i, and c moves by omega_i times a client's change. c is then the mean of omega_i c_i.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML
2020, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from algorithms import tree
from algorithms.aggregate import omega
from algorithms.base import (
    ClientContext,
    ClientUpdate,
    ComputedPayload,
    LocalRule,
    Memory,
    Objective,
    RoundInfo,
    Tensors,
    UpdateInfo,
    WeightedSum,
)
from algorithms.client import required_direction, required_payload, required_state
from algorithms.compose import SENT, ClientState, ClientWeights, Correction, Method, Sums
from algorithms.precision import widened


def scaffold(option: Literal["I", "II"] = "II", objective: Objective = "uniform") -> Method:
    """option: rule for c_i+; objective: the mean of f_i, over clients or over examples."""
    return Method(control_variates(option, objective), "uniform")


def control_variates(option: Literal["I", "II"], objective: Objective, skipping: float = 0.0) -> Correction:
    """The correction of SCAFFOLD, for any server optimizer.

    skipping: p of random skipping. The mean number of steps 1/p takes the place of K_i in option II. 0: K_i.
    """
    variates, first = _Variates(option == "I", objective, skipping), option == "I"
    only_sgd = "c_i+ = c_i - c - delta_i / (K_i eta_l) is a mean gradient only for plain SGD"
    return Correction(
        _local_rule,
        memory={"c": 0.0},
        sends="c",
        payloads=("delta", "variate_change") if first else ("delta",),
        computed={"variate_change": ComputedPayload(("full_gradient",), _variate_change)},
        sums=variates.sums,
        advance=variates.advance,
        client=ClientState(("c_i",), _first_option if first else variates.next_variate),
        objective=objective,
        needs_population=True,
        needs_sgd="" if first else only_sgd,
        skipping=skipping,
    )


@dataclass(frozen=True)
class _Variates:
    """The rules for c and c_i. first: by option I."""

    first: bool
    objective: Objective
    skipping: float

    def divisor(self, steps: int) -> float:
        """K_i, or its mean."""
        return 1.0 / self.skipping if self.skipping else steps

    def next_variate(self, client: ClientContext, update: ClientUpdate) -> Memory:
        """c_i - c - delta_i / (K_i eta_l)."""
        c_i = tree.subtract(required_state(client, "c_i"), _shared(client))
        delta = widened(required_payload(update, "delta"))
        return {"c_i": tree.add(c_i, delta, -1.0 / (self.divisor(update.steps) * update.learning_rate))}

    def sums(self, p: ClientWeights, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
        """Dbar, and the change of c without its share of c itself."""
        N, eta_l = round_info.need("population"), round_info.learning_rate
        shares = [omega(self.objective, k, round_info) for k in cohort]
        if self.first:
            return {"Dbar": WeightedSum(p), "C": WeightedSum(tuple(share / N for share in shares), "variate_change")}
        rows = zip(shares, cohort, strict=True)
        C = WeightedSum(tuple(-share / (N * eta_l * self.divisor(k.num_steps)) for share, k in rows))
        return {"Dbar": WeightedSum(p), "C": C}

    def advance(self, memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
        """The movement, and the next c."""
        moved = 0.0 if self.first else round_info.need("cohort_size") / round_info.need("population")
        c, sent = memory["c"], sums[SENT]
        # Clients subtract the c that they were sent. If it was rounded, c must move by the rounded one too.
        rest = tree.scale(c, 1.0 - moved) if sent is c else tree.add(c, sent, -moved)
        return sums["Dbar"], {"c": tree.add(rest, sums["C"])}


def _local_rule(client: ClientContext) -> LocalRule:
    return LocalRule(u=tree.subtract(_shared(client), required_state(client, "c_i")))


def _variate_change(client: ClientContext, update: ClientUpdate) -> Tensors:
    """g_i(x_t) - c_i."""
    return tree.subtract(required_payload(update, "full_gradient"), required_state(client, "c_i"))


def _first_option(client: ClientContext, update: ClientUpdate) -> Memory:
    """c_i + (g_i(x_t) - c_i), computed from the change that the server received."""
    return {"c_i": tree.add(required_state(client, "c_i"), widened(required_payload(update, "variate_change")))}


def _shared(client: ClientContext) -> Tensors:
    """c / omega_i."""
    c = widened(required_direction(client, "the control variate c"))
    return c if client.omega == 1.0 else tree.scale(c, 1.0 / client.omega)
