"""FedSAM and MoFedSAM: sharpness-aware local steps, with the gradient at the worst point within a radius.

    e         = rho * g(y) / ||g(y)||                     one norm over all trainable parameters
    gs        = g(y + e)                                  same mini-batch, same dropout mask; applied at y
    FedSAM    d = gs                                      server as FedAvg
    MoFedSAM  d = beta * gs + (1 - beta) * Delta_t        server as FedCM

beta is the share of the LOCAL gradient: beta = 1 is FedSAM. Both have the same weights. rho = 0 is FedAvg with these
weights, or FedCM with alpha = beta. The ascent has no weight decay, its norm has 1e-12 added, and batch-norm statistics
use the first pass only. `gradient = sam` applies the same ascent to every other correction. `sam_scope = tensor` uses
one norm for each tensor, which is another method. With order = "feddyn_code" the effective weight decay of
MoFedSAM is wd/beta (see fedcm).

`sam_p` is the order of the norm, over 1 and finite. The step e of p-norm rho along which a linear loss ascends most is

    e         = rho * sign(g) |g|^(q-1) / (||g||_q^q)^(1/p)         1/p + 1/q = 1;  p = 2 is the one above

A large p comes close to rho * sign(g). At p = 1 only the largest entry would move, and which one is not defined if two
are equal.

Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.
"""

from __future__ import annotations

from algorithms.base import Weights
from algorithms.compose import Correction, Method
from algorithms.methods.fedcm import client_momentum
from algorithms.parameters import SharePerRound


def fedsam(weights: Weights = "uniform") -> Method:
    """weights: p_i uniform, as in the paper, or by examples; rho is the radius of the ascent."""
    return Method(Correction(), weights, gradient="sam")


def mofedsam(beta: SharePerRound = 0.1, weights: Weights = "uniform") -> Method:
    """beta: the local share; weights: p_i uniform, as in the paper, or by examples; rho is the radius of the ascent."""
    return Method(client_momentum(beta), weights, gradient="sam")
