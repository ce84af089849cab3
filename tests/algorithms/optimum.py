"""The optimum of a federation of least-squares problems."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.conformance.federation import Federation, total


def minimiser(federation: Federation, by_examples: bool = False) -> Tensor:
    """The minimiser of the mean of f_i, over clients or over examples: a linear system."""
    clients = federation.clients
    p = [len(client.A) if by_examples else 1 for client in clients]
    H = total(p_i * client.A.T @ client.A / len(client.A) for p_i, client in zip(p, clients, strict=True))
    r = total(p_i * client.A.T @ client.b / len(client.A) for p_i, client in zip(p, clients, strict=True))
    solution: Tensor = torch.linalg.solve(H, r)
    return solution
