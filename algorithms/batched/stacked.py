"""Arithmetic on stacked tensors: named tensors [clients, ...], with one factor for all clients or one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms import tree
from algorithms.base import Tensors

Factor = float | Tensor
"""A factor of all clients, or a tensor [clients] with one for each."""


def stack(parts: Sequence[Tensors]) -> Tensors:
    """One tensor of each name, [clients, ...]. Tensors that all clients share are not copied."""
    return {name: _stacked([part[name] for part in parts]) for name in parts[0]}


def _stacked(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if all(tensor is first for tensor in tensors):
        return first.expand(len(tensors), *first.shape)
    return torch.stack(tensors)


def repeated(tensors: Tensors, clients: int) -> Tensors:
    """A copy of the tensors for each client."""
    return tree.map(lambda tensor: tensor.repeat(clients, *(1 for _ in tensor.shape)), tensors)


def first(tensors: Tensors, clients: int) -> Tensors:
    """Views of the first clients' tensors."""
    return tree.map(lambda tensor: tensor[:clients], tensors)


def of_client(tensors: Tensors, position: int) -> Tensors:
    """Views of one client's tensors."""
    return tree.map(lambda tensor: tensor[position], tensors)


def factor_of(values: Sequence[float], like: Tensor) -> Factor:
    """The values as one number if they are equal, else as a tensor [clients] on the device of `like`."""
    if len(set(values)) == 1:
        return values[0]
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def first_of(factor: Factor, clients: int) -> Factor:
    """The factor of the first clients."""
    return factor[:clients] if isinstance(factor, Tensor) else factor


def equals(factor: Factor, value: float) -> bool:
    """Whether it is this number for all clients. It is decided without a synchronization of a device."""
    return not isinstance(factor, Tensor) and factor == value


def scale(a: Tensors, factor: Factor) -> Tensors:
    """factor * a."""
    if isinstance(factor, Tensor):
        return {name: tensor * _shaped(factor, tensor) for name, tensor in a.items()}
    return tree.scale(a, factor)


def add(a: Tensors, b: Tensors, factor: Factor = 1.0) -> Tensors:
    """a + factor * b."""
    if isinstance(factor, Tensor):
        return {name: torch.addcmul(tensor, b[name], _shaped(factor, tensor)) for name, tensor in a.items()}
    return tree.add(a, b, factor)


def add_(a: Tensors, b: Tensors, factor: Factor) -> None:
    """a <- a + factor * b."""
    if isinstance(factor, Tensor):
        for name, tensor in a.items():
            tensor.addcmul_(b[name], _shaped(factor, tensor))
    else:
        tree.add_(a, b, factor)


def lerp_(a: Tensors, b: Tensors, weight: Factor) -> None:
    """a <- a + weight * (b - a); bit-exact where a = b."""
    if isinstance(weight, Tensor):
        for name, tensor in a.items():
            tensor.lerp_(b[name], _shaped(weight, tensor).expand_as(tensor))
    else:
        tree.lerp_(a, b, weight)


def norms(a: Tensors) -> Tensor:
    """Each client's L2 norm over all entries of all tensors, [clients]."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each_norm(tensor) for tensor in a.values()]), dim=0)
    return norm


def each_norm(tensor: Tensor) -> Tensor:
    """Each client's L2 norm over one tensor, [clients]."""
    norm: Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1)
    return norm


def clipped(g: Tensors, max_norm: float) -> Tensors:
    """g * min(1, C / (||g|| + 1e-6)) with each client's own norm. 0: no clipping."""
    return scale(g, (max_norm / (norms(g) + 1e-6)).clamp(max=1.0)) if max_norm else g


def _shaped(factor: Tensor, like: Tensor) -> Tensor:
    """[clients] -> [clients, 1, ...] with the dimensions of `like`."""
    return factor.to(like.dtype).view(-1, *(1 for _ in like.shape[1:]))
