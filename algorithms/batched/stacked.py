"""Arithmetic on stacked tensors: named tensors [clients, ...], with a factor for each client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms import tree
from algorithms.base import LocalSettings, Tensors


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


def factor_of(values: Sequence[float], like: Tensor, neutral: float | None = None) -> Tensor | None:
    """A factor for each client, [clients], on the device of `like`; None if all are neutral.

    It is float64, as numbers of Python are: a product of two factors is rounded to a model's dtype once.
    """
    return None if set(values) == {neutral} else tree.uploaded(values, torch.float64, like.device)


def scale(a: Tensors, factor: Tensor) -> Tensors:
    """factor * a. factor: [clients]; so are those below."""
    return {name: tensor * _shaped(factor, tensor) for name, tensor in a.items()}


def add(a: Tensors, b: Tensors, factor: Tensor) -> Tensors:
    """a + factor * b."""
    return {name: torch.addcmul(tensor, b[name], _shaped(factor, tensor)) for name, tensor in a.items()}


def add_(a: Tensors, b: Tensors, factor: Tensor) -> None:
    """a <- a + factor * b."""
    for name, tensor in a.items():
        tensor.addcmul_(b[name], _shaped(factor, tensor))


def lerp_(a: Tensors, b: Tensors, weight: Tensor) -> None:
    """a <- a + weight * (b - a); bit-exact where a = b."""
    for name, tensor in a.items():
        tensor.lerp_(b[name], _shaped(weight, tensor).expand_as(tensor))


def norms(a: Tensors) -> Tensor:
    """Each client's L2 norm over all entries of all tensors, [clients]."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each_norm(tensor) for tensor in a.values()]), dim=0)
    return norm


def each_norm(tensor: Tensor) -> Tensor:
    """Each client's L2 norm over one tensor, [clients]."""
    norm: Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1)
    return norm


def clipped(g: Tensors, settings: LocalSettings) -> Tensors:
    """clip(g) with each client's own norm."""
    return scale(g, settings.clip_factor(norms(g))) if settings.clips else g


def _shaped(factor: Tensor, like: Tensor) -> Tensor:
    """[clients] -> [clients, 1, ...] with the dimensions of `like`."""
    return factor.to(like.dtype).view(-1, *(1 for _ in like.shape[1:]))
