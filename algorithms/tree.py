"""Arithmetic on named tensors.

Functions return new tensors. As in torch, a function whose name ends in an underscore writes into its first argument.
All tensors of an operation are handled in one call (torch._foreach), so that on a GPU a step needs a few kernels and
not a few for each parameter. Operands are matched by name. The result has the order of the first operand.

On a CPU, allocating a large result costs several times as much as computing it. So functions that run in every step
take `into`: memory from `scratch` for the result, which may also be an operand. The result has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from algorithms.base import Tensors

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their bytes."""


def map(function: Callable[..., torch.Tensor], first: Tensors, *others: Tensors) -> Tensors:
    """`function` applied to the tensors of each name in turn."""
    return {name: function(tensor, *(other[name] for other in others)) for name, tensor in first.items()}


def full_like(a: Tensors, value: float) -> Tensors:
    """Tensors with the layout of `a` and every entry equal to `value`."""
    return map(lambda tensor: torch.full_like(tensor, value), a)


def scratch(a: Tensors) -> Tensors | None:
    """Reusable memory for results with the layout of `a`; None on a GPU, whose allocator caches memory.

    Each tensor is allocated at its first use, so that operations a method does not make cost no memory.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in a.values())
    return _Scratch(a) if on_cpu else None


def add(a: Tensors, b: Tensors, scale: float = 1.0, into: Tensors | None = None) -> Tensors:
    """a + scale * b; exact for a scale of 1."""
    if into is not None:
        return map(lambda a, b, out: torch.add(a, b, alpha=scale, out=out), a, b, into)
    return _named(a, torch._foreach_add(list(a.values()), _matched(a, b), alpha=scale))


def accumulate(memory: Tensors, beta: float, a: Tensors, into: Tensors | None = None) -> Tensors:
    """beta * memory + a, the momentum of the papers. For beta = 0 it is `a`, and the memory is not read."""
    return add(a, memory, beta, into) if beta else a


def subtract(a: Tensors, b: Tensors, into: Tensors | None = None) -> Tensors:
    """a - b."""
    if into is not None:
        return map(lambda a, b, out: torch.sub(a, b, out=out), a, b, into)
    return _named(a, torch._foreach_sub(list(a.values()), _matched(a, b)))


def scale(a: Tensors, factor: float | torch.Tensor, into: Tensors | None = None) -> Tensors:
    """factor * a. A factor of shape [] stays on its device."""
    if into is not None:
        return map(lambda a, out: torch.mul(a, factor, out=out), a, into)
    return _named(a, torch._foreach_mul(list(a.values()), factor))


def lerp(a: Tensors, b: Tensors, weight: float) -> Tensors:
    """(1 - weight) * a + weight * b: the moving average of the papers."""
    return _named(a, torch._foreach_lerp(list(a.values()), _matched(a, b), weight))


def to(a: Tensors, device: torch.device) -> Tensors:
    """The tensors on a device; those that are there are not copied."""
    return map(lambda tensor: tensor.to(device), a)


def uploaded(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of numbers on a device, which is not waited for."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def uploaded_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the host on a device, by one copy from pinned memory, which is not waited for."""
    if device.type == "cpu":
        return [*tensors]
    places = [-(-tensor.nbytes // 8) * 8 for tensor in tensors]  # each begins where a value of any dtype may
    whole = torch.empty(sum(places), dtype=torch.uint8, pin_memory=True)

    def parts(of: torch.Tensor) -> list[torch.Tensor]:
        cut = zip(of.split(places), tensors, strict=True)
        return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in cut]

    for part, tensor in zip(parts(whole), tensors, strict=True):
        part.copy_(tensor)
    return parts(whole.to(device, non_blocking=True))


def rows_of(tensor: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """tensor[numbers], without waiting for its device."""
    return tensor[uploaded(numbers, torch.int64, tensor.device)]


def norm(a: Tensors) -> torch.Tensor:
    """The L2 norm over all entries of all tensors, of shape [], on their device, without synchronization."""
    return whole_norm(norms(a))


def norms(a: Tensors) -> list[torch.Tensor]:
    """The L2 norm of each tensor; `whole_norm` combines them."""
    return list(torch._foreach_norm(list(a.values())))


def whole_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """The L2 norm over all tensors with these norms."""
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


def add_(a: Tensors, b: Tensors, scale: float = 1.0) -> None:
    """a <- a + scale * b."""
    torch._foreach_add_(list(a.values()), _matched(a, b), alpha=scale)


def lerp_(a: Tensors, b: Tensors, weight: float) -> None:
    """a <- a + weight * (b - a); bit-exact where a = b."""
    torch._foreach_lerp_(list(a.values()), _matched(a, b), weight)


def copy_(a: Tensors, b: Tensors) -> None:
    """a <- b."""
    torch._foreach_copy_(list(a.values()), _matched(a, b))


def check_layout(expected: Tensors, given: Tensors, what: str) -> None:
    """Raise ValueError, naming `what`, unless `given` has the names, shapes and dtypes of `expected`, in any order.

    Without this check torch would silently broadcast a wrong shape.
    """
    missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"{what}: expected the tensors of the model, got {missing} missing and {unknown} unknown; "
            "check that both sides build the same model"
        )
    for name, tensor in expected.items():
        if (tensor.shape, tensor.dtype) != (given[name].shape, given[name].dtype):
            raise ValueError(
                f"{what}, tensor {name!r}: expected {_layout(tensor)}, got {_layout(given[name])}; "
                "check that both sides build the same model"
            )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and bits, also where values are NaN. b may be elsewhere."""
    return a.shape == b.shape and torch.equal(bits(a), bits(b.to(a.device)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each entry as an integer."""
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


class _Scratch(Tensors):
    def __init__(self, like: Tensors) -> None:
        super().__init__()
        self._like = like

    def __missing__(self, name: str) -> torch.Tensor:
        self[name] = torch.empty_like(self._like[name])
        return self[name]


def _matched(a: Tensors, b: Tensors) -> list[torch.Tensor]:
    return [b[name] for name in a]


def _named(a: Tensors, tensors: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> Tensors:
    return dict(zip(a, tensors, strict=True))


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
