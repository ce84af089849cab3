"""FedRobust: training against affine shifts of the inputs, which each client chooses to increase the loss.

    min_x max_{L_i, q_i}  sum_i mean_j loss(x; L_i z_j + q_i, label_j) - lam * (||L_i - I||^2 + ||q_i||^2)

    client    y   <- y - eta_l * g                                        both from one pass
              L_i <- L_i + eta_2 * (dloss/dL - 2 lam (L_i - I))           L_i = I, q_i = 0 at first
              q_i <- q_i + eta_2 * (dloss/dq - 2 lam q_i)
    server    x_{t+1} = x_t + eta_g * Dbar

L = diagonal, the default: one entry of L_i and of q_i for each channel (dimension 1 of the inputs).
L = matrix: the paper's map. L_i is a matrix over a whole flattened input and q_i has its length: d^2 + d numbers for d
inputs, which the client keeps on disk. L = channel_matrix: a matrix over the channels, the same at every pixel; for
inputs [batch, d] it is the paper's map. For such inputs, a matrix with zeros outside its diagonal is the diagonal form.

They stay on the client, also in rounds that it skips. lam must be large enough for a concave inner problem, and
eta_2 < 1 / (2 lam). eta_2 = 0 is FedAvg.

Reisizadeh, Farnia, Pedarsani, Jadbabaie: Robust Federated Learning: The Case of Affine Distribution Shifts, NeurIPS
2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from algorithms import tree
from algorithms.base import ClientContext, ClientUpdate, InputAscent, LocalRule, Memory, Tensors, Weights
from algorithms.compose import ClientState, Correction, Method
from algorithms.parameters import AlgorithmError, NonNegative, Positive

MAX_ENTRIES = 2**26
"""Largest matrix: 256 MB of float32. A local step holds it, its gradient and its next value."""

Form = Literal["diagonal", "channel_matrix", "matrix"]


def fedrobust(
    eta_2: NonNegative = 0.01, lam: Positive = 1.0, L: Form = "diagonal", weights: Weights = "uniform"
) -> Method:
    """eta_2: rate of the ascent; lam: penalty for leaving L = I, q = 0; L: its form; weights: uniform, as in the paper.

    Raises:
        AlgorithmError: eta_2 is so large that the penalty term alone diverges.
    """
    if 2.0 * lam * eta_2 >= 1.0:
        raise AlgorithmError(f"fedrobust: expected eta_2 < 1 / (2 lam) = {0.5 / lam:g}, got {eta_2:g}")
    return Method(affine_shift(eta_2, lam, L), weights)


def affine_shift(eta_2: float, lam: float, form: Form = "diagonal") -> Correction:
    """The ascent of FedRobust, for any server optimizer."""
    map_ = _Diagonal() if form == "diagonal" else _Matrix(by_channel=form == "channel_matrix")

    def ascend(A: Tensors, slope: Tensors) -> Tensors:
        away = {"L": A["L"] - map_.identity(A["L"]), "q": A["q"]}
        return tree.add(A, tree.add(slope, away, -2.0 * lam), eta_2)

    def local_rule(client: ClientContext) -> LocalRule:
        if eta_2 == 0.0:
            return LocalRule()
        A = dict(client.state.get("A_i", {}))  # without a state it starts from the identity
        if A and A.keys() != {"L", "q"}:
            raise AlgorithmError(
                f"fedrobust: expected L and q in the client's state A_i, got {', '.join(A)}; a client without its "
                "state starts from the method's client_init"
            )
        return LocalRule(ascent=InputAscent(A, map_.start, map_.apply, ascend))

    def next_state(client: ClientContext, update: ClientUpdate) -> Memory:
        if eta_2 == 0.0:
            return client.state
        if not update.ascent:
            raise AlgorithmError(
                "fedrobust: expected the input map after the last step in the update's `ascent`, got none; make the "
                "update with `answer`"
            )
        return {"A_i": update.ascent}

    return Correction(
        local_rule,
        client=ClientState(advance=next_state),
        no_loop="each of its local steps moves the map of the inputs too, and a loop does not know the map",
    )


def _check_inputs(inputs: Tensor) -> None:
    if not inputs.is_floating_point() or inputs.dim() < 2:
        raise AlgorithmError(
            f"fedrobust: expected floating inputs [batch, channels, ...], got {inputs.dtype} {list(inputs.shape)}"
        )


class _Diagonal:
    """L z + q with one entry of L and of q for each channel."""

    def identity(self, L: Tensor) -> Tensor:
        """I in the form of L."""
        return torch.ones_like(L)

    def start(self, inputs: Tensor) -> Tensors:
        """L = I and q = 0 for such inputs."""
        _check_inputs(inputs)
        return {"L": inputs.new_ones(inputs.shape[1]), "q": inputs.new_zeros(inputs.shape[1])}

    def apply(self, inputs: Tensor, A: Tensors) -> Tensor:
        """L z + q of each input."""
        shape = (1, -1, *(1 for _ in inputs.shape[2:]))
        return A["L"].view(shape) * inputs + A["q"].view(shape)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """L z + q with a matrix L over a whole input or, at every pixel, over the channels."""

    by_channel: bool

    def identity(self, L: Tensor) -> Tensor:
        """I in the form of L."""
        return torch.eye(len(L), dtype=L.dtype, device=L.device)

    def start(self, inputs: Tensor) -> Tensors:
        """L = I and q = 0 for such inputs. Raises AlgorithmError if L would be too large."""
        _check_inputs(inputs)
        size = inputs.shape[1] if self.by_channel else inputs[0].numel()
        if size**2 > MAX_ENTRIES:
            raise AlgorithmError(
                f"fedrobust: expected a matrix L of at most {MAX_ENTRIES:,} entries, got {size:,} x {size:,} for "
                f"inputs {list(inputs.shape[1:])}; set L = channel_matrix or L = diagonal"
            )
        return {"L": self.identity(inputs.new_empty(size, 0)), "q": inputs.new_zeros(size)}

    def apply(self, inputs: Tensor, A: Tensors) -> Tensor:
        """L z + q of each input."""
        if self.by_channel:
            return (inputs.movedim(1, -1) @ A["L"].T + A["q"]).movedim(-1, 1)
        return (inputs.flatten(1) @ A["L"].T + A["q"]).view_as(inputs)
