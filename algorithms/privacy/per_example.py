"""Sums of clipped gradients of single examples, for any model and any structure of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from algorithms import tree
from algorithms.base import Tensors
from algorithms.batches import Batch, Forward, examples_of, leaves, map_leaves, split
from algorithms.model_state import trainable_parameters
from algorithms.parameters import AlgorithmError

CHUNK_BYTES = 64 << 20
"""Bytes of the gradients of single examples that are in memory at once."""


def check_model(model: nn.Module) -> None:
    """Raises AlgorithmError for a model whose examples depend on each other, so that none can be clipped alone."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise AlgorithmError(
                "expected a model without batch norm, because DP-SGD clips the gradient of each example alone, got"
                f" {type(module).__name__} {name!r}; use torch.nn.GroupNorm instead"
            )


@dataclass(frozen=True, slots=True)
class Clipping:
    """How gradients of single examples are computed."""

    clip: float
    """C: the largest L2 norm of an example's gradient over all trainable parameters. Longer ones are shortened to C."""
    chunk: int = 0
    """Examples whose gradients are in memory at once. 0: as many as CHUNK_BYTES has room for."""


class ClippedGradients:
    """sum_i min(1, C / ||g_i||) g_i over the examples of a batch, at the model's current values.

    g_i is the gradient of the loss of a batch that has only example i, so nothing of another example is in it. An
    example whose gradient is not finite adds nothing. The model's buffers are read and never changed.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[Any, Any], Tensor], forward: Forward, clipping: Clipping
    ) -> None:
        """loss, forward: as in `train_locally`. Raises AlgorithmError as `check_model`."""
        check_model(model)
        self._losses, self._clipping = _Losses(model, loss, forward), clipping
        self._parameters = trainable_parameters(model)
        size = 4 * sum(parameter.numel() for parameter in self._parameters.values())
        self._chunk = clipping.chunk or max(1, CHUNK_BYTES // size)
        # torch.func has no fused recurrent layers: it would map them one example at a time, with a warning.
        self._maps = not any(isinstance(module, nn.RNNBase) for module in model.modules())

    def sum(self, batch: Batch) -> Tensors:
        """The sum over a batch on the model's device, in float32 or wider; zeros for a batch without an example."""
        parameters = tree.map(torch.detach, self._parameters)
        total = {name: torch.zeros_like(tensor, dtype=_wide(tensor)) for name, tensor in parameters.items()}
        if not examples_of(batch):
            return total
        for chunk in split(batch, self._chunk):
            for gradients in self._gradients(parameters, chunk):
                factors = _factors(gradients, self._clipping.clip)
                for name, g in gradients.items():
                    flat = g.flatten(1).to(total[name].dtype)
                    total[name] += (factors.to(flat.dtype) @ flat).view_as(total[name])
        return total

    def _gradients(self, parameters: Tensors, batch: Batch) -> Iterator[Tensors]:
        """The gradients [examples, ...] of a chunk, in one part or in one for each example."""
        if self._maps and all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves(batch)):
            try:
                yield self._mapped(parameters, batch)
            except (RuntimeError, NotImplementedError, ValueError):
                # What torch.func cannot map, such as a branch that depends on values.
                self._maps = False
            else:
                return
        for one in split(batch, 1):
            yield {name: g.unsqueeze(0) for name, g in self._of_one(parameters, one).items()}

    def _mapped(self, parameters: Tensors, batch: Batch) -> Tensors:
        buffers = self._losses.buffers_now()

        def loss(parameters: Tensors, *example: Tensor) -> Tensor:
            parts = iter(example)
            return self._losses.of(parameters, buffers, map_leaves(lambda _: next(parts).unsqueeze(0), batch))

        examples = tuple(leaves(batch))
        places = (None, *(0 for _ in examples))
        with _ConvolutionsAsProducts():
            gradients: Tensors = vmap(grad(loss), in_dims=places, randomness="different")(parameters, *examples)
        return gradients

    def _of_one(self, parameters: Tensors, example: Batch) -> Tensors:
        """The gradient of a batch of one example, by a pass of its own."""
        mine = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
        value = self._losses.of(mine, self._losses.buffers_now(), example)
        found = torch.autograd.grad(value, [*mine.values()], allow_unused=True)
        return {
            name: torch.zeros_like(tensor) if g is None else g.to_dense() if g.is_sparse else g
            for (name, tensor), g in zip(mine.items(), found, strict=True)
        }


class _Losses(nn.Module):
    """The loss of a batch, as a module whose only part is the model."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._loss, self._forward = loss, forward

    def buffers_now(self) -> Tensors:
        """Copies of the model's buffers, which a pass may change."""
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def of(self, parameters: Tensors, buffers: Tensors, batch: Batch) -> Tensor:
        """The loss [] with these parameters and buffers in place of the model's own."""
        tensors = {f"model.{name}": tensor for name, tensor in {**parameters, **buffers}.items()}
        value: Tensor = functional_call(self, tensors, (batch,))
        return value

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss of a batch, of shape []."""
        return self._loss(*self._forward(self.model, batch)).reshape(())


class _ConvolutionsAsProducts(TorchFunctionMode):
    """Two-dimensional convolutions are computed as products of matrices while it is active.

    The weight's gradients of single examples are then one batched product. By torch's own rule they are a convolution
    with a group for each example, which takes several times as long.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        if func is functional.conv2d:
            return _convolved(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _convolved(  # noqa: PLR0913, PLR0917 - the parameters of torch's function
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """The convolution by torch.nn.functional.unfold, where it can; by torch's own function otherwise."""
    if groups != 1 or isinstance(padding, str) or inputs.dim() != 4:
        return functional.conv2d(inputs, weight, bias, stride, padding, dilation, groups)
    size, steps, edges, gaps = (_pair(value) for value in (weight.shape[2:], stride, padding, dilation))
    height, width = (
        (length + 2 * edge - gap * (extent - 1) - 1) // step + 1
        for length, edge, gap, extent, step in zip(inputs.shape[2:], edges, gaps, size, steps, strict=True)
    )
    columns = functional.unfold(inputs, size, gaps, edges, steps)
    output: Tensor = (weight.flatten(1) @ columns).unflatten(2, (height, width))
    return output if bias is None else output + bias[:, None, None]


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _factors(gradients: Tensors, clip: float) -> Tensor:
    """min(1, C / ||g_i||) of each example, [examples]; 0 where the norm is not finite, whose gradients become zero."""
    norms = [torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=_wide(g)) for g in gradients.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms).double(), dim=0)
    finite = norm.isfinite()
    if not bool(finite.all()):
        for g in gradients.values():
            g[~finite] = 0.0
    return torch.where(finite, clip / norm.clamp(min=clip), 0.0)
