"""FedSAM and MoFedSAM: local steps by the gradient at the worst point near by.

    e         = rho * g(y) / ||g(y)||                     one norm over all trainable parameters
    gs        = g(y + e)                                  same mini-batch, same dropout mask; taken there, applied at y
    FedSAM    d = gs                                      server as FedAvg
    MoFedSAM  d = beta * gs + (1 - beta) * Delta_t        server as FedCM

beta is the share of the LOCAL gradient: beta = 1 is FedSAM. rho = 0 is FedAvg, and FedCM with alpha = beta. There is no
weight decay in the ascent, its norm has 1e-12 added, and batch norm's statistics see the first pass alone. `gradient =
sam` gives the same to every other correction; `sam_scope = tensor`, another method, takes one norm for each tensor.

Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.
"""

from __future__ import annotations

from algorithms.base import Weights
from algorithms.compose import Correction, Method
from algorithms.fedcm import client_momentum
from algorithms.parameters import Share


def fedsam(weights: Weights = "examples") -> Method:
    """weights: by examples or uniform; rho is the radius of the ascent."""
    return Method(Correction(), weights, gradient="sam")


def mofedsam(beta: Share = 0.1, weights: Weights = "uniform") -> Method:
    """beta: the local share; weights: uniform or by examples; rho is the radius of the ascent."""
    return Method(client_momentum(beta), weights, gradient="sam")
