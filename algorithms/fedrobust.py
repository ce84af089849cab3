"""FedRobust: the model is trained on inputs that each client shifts and stretches to make the loss worse.

    min_x max_{L_i, q_i}  sum_i mean_j loss(x; L_i z_j + q_i, label_j) - lam * (||L_i - 1||^2 + ||q_i||^2)

    client    y   <- y - eta_l * g                                        both at once, from one pass
              L_i <- L_i + eta_2 * (dloss/dL - 2 lam (L_i - 1))           L_i = 1, q_i = 0 at first
              q_i <- q_i + eta_2 * (dloss/dq - 2 lam q_i)
    server    x_{t+1} = x_t + eta_g * Dbar

L_i and q_i have one entry for each channel (dimension 1 of the inputs), where the paper's L is a matrix over all of an
input. They never leave the client; one that sits out keeps them. lam must be large enough for a concave inner problem,
with eta_2 < 1 / (2 lam). eta_2 = 0 is FedAvg.

Reisizadeh, Farnia, Pedarsani, Jadbabaie: Robust Federated Learning: The Case of Affine Distribution Shifts, NeurIPS
2020.
"""

from __future__ import annotations

from torch import Tensor

from algorithms import tree
from algorithms.base import ClientContext, ClientUpdate, InputAscent, LocalRule, Memory, Tensors, Weights
from algorithms.compose import ClientState, Correction, Method
from algorithms.parameters import AlgorithmError, NonNegative, Positive


def fedrobust(eta_2: NonNegative = 0.01, lam: Positive = 1.0, weights: Weights = "uniform") -> Method:
    """eta_2: rate of the ascent; lam: price of leaving L = 1, q = 0; weights: uniform, as in the paper, or by examples.

    Raises:
        AlgorithmError: eta_2 is so large that the ascent runs away from L = 1, q = 0 by itself.
    """
    if 2.0 * lam * eta_2 >= 1.0:
        raise AlgorithmError(f"fedrobust: expected eta_2 < 1 / (2 lam) = {0.5 / lam:g}, got {eta_2:g}")
    return Method(affine_shift(eta_2, lam), weights)


def affine_shift(eta_2: float, lam: float) -> Correction:
    """The ascent of FedRobust, for any server optimizer."""

    def ascend(A: Tensors, slope: Tensors) -> Tensors:
        away = {"L": A["L"] - 1.0, "q": A["q"]}
        return tree.add(A, tree.add(slope, away, -2.0 * lam), eta_2)

    def local_rule(client: ClientContext) -> LocalRule:
        if eta_2 == 0.0:
            return LocalRule()
        return LocalRule(ascent=InputAscent(dict(client.state.get("A_i", {})), _identity, _shifted, ascend))

    def next_state(client: ClientContext, update: ClientUpdate) -> Memory:
        return {"A_i": update.ascent} if update.ascent else client.state

    return Correction(local_rule, client=ClientState(advance=next_state))


def _identity(inputs: Tensor) -> Tensors:
    """L = 1 and q = 0, one entry for each channel."""
    if not inputs.is_floating_point() or inputs.dim() < 2:
        raise AlgorithmError(
            f"fedrobust: expected floating inputs [batch, channels, ...], got {inputs.dtype} {list(inputs.shape)}"
        )
    return {"L": inputs.new_ones(inputs.shape[1]), "q": inputs.new_zeros(inputs.shape[1])}


def _shifted(inputs: Tensor, A: Tensors) -> Tensor:
    """L * z + q by channel."""
    shape = (1, -1, *(1 for _ in inputs.shape[2:]))
    return A["L"].view(shape) * inputs + A["q"].view(shape)
