"""The point of SAM: the step of length rho, in a p-norm, along which the loss ascends most."""

from __future__ import annotations

from dataclasses import replace

import torch

from algorithms import tree
from algorithms.base import GradientRule, Tensors


def ascent(g: Tensors, rule: GradientRule, into: Tensors | None) -> Tensors:
    """rho * g / (||g|| + 1e-12), or that of another norm; 0 for g = 0."""
    if rule.p != 2.0:
        rows = tree.map(lambda tensor: tensor.unsqueeze(0), g)
        return tree.map(lambda tensor: tensor.squeeze(0), ascent_in_norm(rows, rule))
    if rule.scope == "tensor":
        return tree.map(lambda tensor: tensor * (rule.rho / (torch.linalg.vector_norm(tensor) + 1e-12)), g)
    return tree.scale(g, rule.rho / (tree.norm(g) + 1e-12), into)


def ascent_in_norm(g: Tensors, rule: GradientRule) -> Tensors:
    """rho * sign(g) |g|^(q-1) / (||g||_q^q)^(1/p) of each client, 1/p + 1/q = 1: the e of norm rho that ascends most.

    g: [clients, ...]. Entries are divided by the largest one first, which changes no result: a power of a gradient may
    be too small for its dtype. The largest quotient is 1, so the sum of the powers is at least 1, but for g = 0.
    """
    if rule.scope == "tensor":
        alone = replace(rule, scope="model")
        return {name: ascent_in_norm({name: tensor}, alone)[name] for name, tensor in g.items()}
    rows = [tensor.reshape(len(tensor), -1) for tensor in g.values()]
    largest = torch.stack([torch.linalg.vector_norm(row, torch.inf, dim=1) for row in rows]).amax(0)
    divisor = largest.where(largest > 0.0, 1.0)[:, None]
    shares = [row.abs() / divisor for row in rows]
    powers = [share.pow(1.0 / (rule.p - 1.0)) for share in shares]  # q - 1 = 1 / (p - 1)
    total = torch.stack([(share * power).sum(1) for share, power in zip(shares, powers, strict=True)]).sum(0)
    factor = (rule.rho * total.clamp(min=1.0).pow(-1.0 / rule.p))[:, None]
    steps = (row.sign() * power * factor for row, power in zip(rows, powers, strict=True))
    return {name: step.reshape(tensor.shape) for (name, tensor), step in zip(g.items(), steps, strict=True)}
