"""Modules that compute for many clients at once: dropout with each client's random numbers, and unfolded convolutions.

A client draws the numbers that it draws when it trains alone: augmentation and dropout masks are the same on a CPU. On
a GPU the masks are reproducible, but torch's dropout of one client draws other ones.

Under vmap a convolution with one weight for each client becomes a grouped convolution, for which some devices have only
slow kernels. As an unfolding and one product of matrices for each client it uses the kernels of linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RandomStream:
    """The default generators as one client sees them; it starts in the state that they have now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.state = self._read()
        """It may be kept and set again, to repeat the numbers."""

    @contextmanager
    def use(self) -> Iterator[None]:
        """The default generators continue this stream within the context. After it their state is undefined."""
        cpu, other = self.state
        torch.default_generator.set_state(cpu)
        if other is not None:
            torch.cuda.set_rng_state(other, self._device)
        try:
            yield
        finally:
            self.state = self._read()

    def _read(self) -> tuple[Tensor, Tensor | None]:
        other = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.default_generator.get_state(), other


@contextmanager
def dropout_by_client(model: nn.Module, streams: Sequence[RandomStream]) -> Iterator[None]:
    """Within the context the model's `nn.Dropout` modules draw each client's mask from its stream, under vmap."""
    modules = [module for module in model.modules() if type(module) is nn.Dropout]
    for module in modules:
        module.forward = _seeded_forward(module, streams)  # type: ignore[method-assign]  # of this object, until the end
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _seeded_forward(module: nn.Dropout, streams: Sequence[RandomStream]) -> Any:
    def forward(inputs: Tensor) -> Tensor:
        if not module.training or not module.p:
            return inputs
        dropped: Tensor = _Dropout.apply(inputs, module.p, streams)  # type: ignore[no-untyped-call]
        return dropped

    return forward


class _Dropout(torch.autograd.Function):
    """Dropout whose batching rule draws one mask for each client."""

    @staticmethod
    def forward(inputs: Tensor, p: float, streams: Sequence[RandomStream]) -> Tensor:
        del inputs, p, streams
        raise RuntimeError("dropout by client needs a client dimension")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: autograd records the operations of the batching rule."""

    @staticmethod
    def vmap(  # noqa: PLR0913, PLR0917 - torch defines the parameters
        info: Any, in_dims: Any, inputs: Tensor, p: float, streams: Sequence[RandomStream]
    ) -> tuple[Tensor, int]:
        del info
        inputs = inputs.movedim(in_dims[0], 0)
        masks = []
        for row, stream in zip(inputs.detach(), streams, strict=True):
            with stream.use():
                # Contiguous, as the inputs of a client alone: the mask is drawn in the order of the memory.
                masks.append(functional.dropout(torch.ones(row.shape, dtype=row.dtype, device=row.device), p))
        return inputs * torch.stack(masks), 0


@contextmanager
def unfolded_convolutions(model: nn.Module) -> Iterator[None]:
    """Within the context the model's plain 2d convolutions are products of matrices. Others stay as they are."""
    modules = _plain(model)
    for module in modules:
        module.forward = _unfolded_forward(module)  # type: ignore[method-assign, assignment]  # of this object, until the end
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


def _unfolded_forward(module: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    def forward(images: Tensor) -> Tensor:
        kernel, stride, dilation = _pair(module.kernel_size), _pair(module.stride), _pair(module.dilation)
        padding = _pair(module.padding)
        columns = functional.unfold(images, kernel, dilation, padding, stride)
        scores = torch.einsum("ok,nkl->nol", module.weight.flatten(1), columns)
        if module.bias is not None:
            scores = scores + module.bias[:, None]
        sides = zip(images.shape[-2:], kernel, stride, padding, dilation, strict=True)
        shape = [(side + 2 * pad - gap * (k - 1) - 1) // step + 1 for side, k, step, pad, gap in sides]
        images_out: Tensor = scores.unflatten(2, shape)
        return images_out

    return forward


def _pair(value: Any) -> tuple[int, int]:
    """Of `nn.Conv2d`, which makes pairs of all numbers that it gets."""
    return value[0], value[1]
