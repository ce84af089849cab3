"""Convolutions as products of matrices, for a model whose weights have a client dimension.

Under vmap a convolution with one weight for each client becomes a grouped convolution, for which some devices have only
slow kernels. As an unfolding and one product of matrices for each client it uses the kernels of linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@contextmanager
def unfolded_convolutions(model: nn.Module) -> Iterator[None]:
    """Within the context the model's plain 2d convolutions are products of matrices. Others stay as they are."""
    modules = _plain(model)
    for module in modules:
        module.forward = _forward(module)  # of this object, until the end
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def has_convolutions(model: nn.Module) -> bool:
    """Whether the model has convolutions that `unfolded_convolutions` changes."""
    return bool(_plain(model))


def _plain(model: nn.Module) -> list[nn.Conv2d]:
    return [
        module
        for module in model.modules()
        if type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    ]


def _forward(module: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    def forward(images: Tensor) -> Tensor:
        kernel, stride, dilation = _pair(module.kernel_size), _pair(module.stride), _pair(module.dilation)
        padding = _pair(module.padding)
        columns = functional.unfold(images, kernel, dilation, padding, stride)
        scores = torch.einsum("ok,nkl->nol", module.weight.flatten(1), columns)
        if module.bias is not None:
            scores = scores + module.bias[:, None]
        sides = zip(images.shape[-2:], kernel, stride, padding, dilation, strict=True)
        shape = [(side + 2 * pad - gap * (k - 1) - 1) // step + 1 for side, k, step, pad, gap in sides]
        return scores.unflatten(2, shape)

    return forward


def _pair(value: Any) -> tuple[int, int]:
    """Of `nn.Conv2d`, which makes pairs of all numbers that it gets."""
    return value[0], value[1]
