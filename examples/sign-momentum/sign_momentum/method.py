"""Sign momentum: local steps mix the gradient with the signs of the server's momentum, where clients agree on them.

    client    d_i     = alpha * g + (1 - alpha) * c(M_t),    c(M) = mean |M| * sign(M) of each tensor
              sends   delta_i  and  signs_i = sign(delta_i)
    server    s       = sum_i p_i signs_i                    the agreement, from -1 to 1 in each entry
              G_t     = - sum_i p_i delta_i / (eta_l K_i)    the mean gradient of the clients' steps
              M_{t+1} = G_t where |s| >= agreement, else 0   M_0 = 0
              x_{t+1} = x_t + eta_g sum_i p_i delta_i

It is FedCM with a compressed direction, as signSGD compresses gradients, and with a vote on the direction, as signSGD
with majority vote has. alpha = 1 is FedAvg.

Xu, Wang, Wang, Yao: FedCM, arXiv 2106.10874. Bernstein, Zhao, Azizzadenesheli, Anandkumar: signSGD with Majority Vote
is Communication Efficient and Fault Tolerant, ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch

import algorithms as fl

__version__ = "1"
"""Part of the method's fingerprint. Raise it when code that this module imports changes the numbers."""

Agreement = Annotated[float, fl.Range(at_least=0, at_most=1)]


def sign_momentum(
    alpha: fl.SharePerRound = 0.2, agreement: Agreement = 0.3, weights: fl.Weights = "uniform"
) -> fl.Method:
    """alpha: the local share; agreement: the least |s| of an entry that keeps its momentum; weights: p_i."""

    def local_rule(client: fl.ClientContext) -> fl.LocalRule:
        if alpha == 1.0:
            return fl.LocalRule()
        if client.direction is None:
            raise fl.AlgorithmError("sign-momentum: expected the momentum M from the server, got none")
        return fl.LocalRule(a=alpha, u={name: (1.0 - alpha) * signs(M) for name, M in client.direction.items()})

    def sums(
        p: tuple[float, ...], cohort: Sequence[fl.UpdateInfo], round_info: fl.RoundInfo
    ) -> dict[str, fl.WeightedSum]:
        return {**fl.mean_delta_and_gradient(p, cohort, round_info), "s": fl.WeightedSum(p, payload="signs")}

    def advance(
        memory: fl.Memory, sums: Mapping[str, fl.Tensors], round_info: fl.RoundInfo
    ) -> tuple[fl.Tensors, fl.Memory]:
        del memory, round_info
        M = {name: torch.where(sums["s"][name].abs() >= agreement, G, 0.0) for name, G in sums["G"].items()}
        return sums["Dbar"], {"M": M}

    correction = fl.Correction(
        local_rule,
        memory={"M": 0.0},
        sends="M",
        payloads=("delta", "signs"),
        computed={"signs": fl.ComputedPayload(("delta",), vote)},
        sums=sums,
        advance=advance,
    )
    return fl.Method(correction, weights)


def signs(M: torch.Tensor) -> torch.Tensor:
    """c(M): the signs, times the mean size of an entry."""
    return M.sign() * M.abs().mean() if M.numel() else M


def vote(client: fl.ClientContext, update: fl.ClientUpdate) -> fl.Tensors:
    """signs_i: -1, 0 or 1 for each entry of the delta."""
    del client
    return {name: delta.sign() for name, delta in update.payloads["delta"].items()}
