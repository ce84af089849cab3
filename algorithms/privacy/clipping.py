"""The clip of a client's whole update, before it leaves the device of client-level privacy.

    r <- r * min(1, C / |r|)

r is what the client learnt: its delta, without the steps along a direction of the server.
"""

from __future__ import annotations

import math

import torch

from algorithms.base import Tensors

_BLOCK = 1 << 14
"""Values whose squares are added at once: torch adds so few in one thread, so threads change no bit."""


def clipped(update: Tensors, most: float) -> Tensors:
    """The update scaled down to the L2 norm `most`, in its dtypes; the update itself if it is not longer."""
    norm = norm_of(update)
    return update if norm <= most else {name: tensor * (most / norm) for name, tensor in update.items()}


def norm_of(update: Tensors) -> float:
    """The L2 norm over all values, added up in float64."""
    blocks = [
        torch.linalg.vector_norm(block, dtype=torch.float64)
        for tensor in update.values()
        for block in tensor.detach().flatten().split(_BLOCK)
    ]
    return math.sqrt(math.fsum(norm * norm for norm in torch.stack(blocks).tolist())) if blocks else 0.0
