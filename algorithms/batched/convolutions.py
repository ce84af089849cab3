"""Convolutions as products of matrices, for a model whose weights have a client dimension.

Under vmap a convolution with one weight for each client becomes a grouped convolution, for which some devices have only
slow kernels. As an unfolding and one product of matrices for each client it uses the kernels of linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional


@contextmanager
def unfolded_convolutions(model: nn.Module) -> Iterator[None]:
    """Within the context the model's plain 2d convolutions are products of matrices. Others stay as they are."""
    modules = [module for module in model.modules() if _is_plain(module)]
    for module in modules:
        module.forward = _forward(module)  # type: ignore[method-assign]  # of this object, until the end
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def has_convolutions(model: nn.Module) -> bool:
    """Whether the model has convolutions that `unfolded_convolutions` changes."""
    return any(_is_plain(module) for module in model.modules())


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(images: Tensor) -> Tensor:
        kernel, stride, padding, dilation = (
            _pair(getattr(module, name)) for name in ("kernel_size", "stride", "padding", "dilation")
        )
        columns = functional.unfold(images, kernel, dilation, padding, stride)
        scores = torch.einsum("ok,nkl->nol", module.weight.flatten(1), columns)
        if module.bias is not None:
            scores = scores + module.bias[:, None]
        sides = zip(images.shape[-2:], kernel, stride, padding, dilation, strict=True)
        return scores.unflatten(
            2, [(side + 2 * pad - gap * (k - 1) - 1) // step + 1 for side, k, step, pad, gap in sides]
        )

    return forward


def _pair(value: tuple[int, ...]) -> tuple[int, int]:
    return value[0], value[1]
