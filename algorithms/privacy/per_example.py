"""Sums of clipped gradients of single examples, for any model and any structure of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from algorithms import tree
from algorithms.base import Tensors
from algorithms.batches import Apart, Batch, Forward, examples_of, leaves, map_leaves, split
from algorithms.model_state import trainable_parameters
from algorithms.parameters import AlgorithmError
from algorithms.privacy.layers import Layer, Watched, found_layers

CHUNK_BYTES = 64 << 20
"""Bytes that the gradients of single examples, and what they are made of, may take at once."""


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
        # torch.func has no fused recurrent layers: it would map them one example at a time, with a warning.
        self._maps = not any(isinstance(module, nn.RNNBase) for module in model.modules())
        self._layers: dict[str, Layer] = {}
        self._shapes: list[tuple[torch.Size, torch.dtype]] | None = None
        """Those of the parts of an example for which the layers were found."""

    def sum(self, batch: Batch | Apart) -> Tensors:
        """The sum over a batch on the model's device, in float32 or wider; zeros for a batch without an example."""
        parameters = tree.map(torch.detach, self._parameters)
        total = {name: torch.zeros_like(tensor, dtype=_wide(tensor)) for name, tensor in parameters.items()}
        for part in batch.parts if isinstance(batch, Apart) else (batch,):
            if examples_of(part):
                self._add(total, parameters, part)
        return total

    def _add(self, total: Tensors, parameters: Tensors, batch: Batch) -> None:
        if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves(batch)):
            self._maps = False
        if self._maps:
            self._find_layers(parameters, batch)
        for chunk in split(batch, self._clipping.chunk or self._chunk(parameters)):
            for gradients in self._gradients(parameters, chunk):
                gradients.add_clipped(total, self._clipping.clip)

    def _find_layers(self, parameters: Tensors, batch: Batch) -> None:
        """Find the layers for examples of other shapes than those before."""
        shapes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves(batch)]
        if shapes == self._shapes:
            return
        example, buffers = map_leaves(lambda leaf: leaf[:1], batch), self._losses.buffers_now()
        with torch.no_grad():
            self._layers = found_layers(parameters, lambda: self._losses.of(parameters, buffers, example))
        self._shapes = shapes

    def _chunk(self, parameters: Tensors) -> int:
        """Examples for which CHUNK_BYTES has room."""
        others = sum(tensor.numel() for name, tensor in parameters.items() if name not in self._layers)
        floats = others + sum(layer.floats for layer in self._layers.values())
        return max(1, CHUNK_BYTES // (4 * floats))

    def _gradients(self, parameters: Tensors, batch: Batch) -> Iterator[_Gradients]:
        """The gradients of a chunk, in one part or in one for each example."""
        if self._maps:
            try:
                yield self._mapped(parameters, batch)
            except (RuntimeError, NotImplementedError, ValueError):
                # What torch.func cannot map, such as a branch that depends on values.
                self._maps = False
            else:
                return
        for one in split(batch, 1):
            yield _Gradients({name: g.unsqueeze(0) for name, g in self._of_one(parameters, one).items()}, {})

    def _mapped(self, parameters: Tensors, batch: Batch) -> _Gradients:
        buffers, layers = self._losses.buffers_now(), self._layers
        of_layers = {name for layer in layers.values() for name in (layer.weight, layer.bias)}
        others = {name: tensor for name, tensor in parameters.items() if name not in of_layers}

        def loss(others: Tensors, zeros: Tensors, *example: Tensor) -> tuple[Tensor, Tensors]:
            parts = iter(example)
            one = map_leaves(lambda _: next(parts).unsqueeze(0), batch)
            with Watched(layers, parameters, zeros) as watched:
                value = self._losses.of({**parameters, **others}, buffers, one)
            return value, watched.inputs

        examples, zeros = tuple(leaves(batch)), {name: layer.zero for name, layer in layers.items()}
        places = (None, None, *(0 for _ in examples))
        mapped = vmap(grad(loss, argnums=(0, 1), has_aux=True), in_dims=places, randomness="different")
        with sdpa_kernel(SDPBackend.MATH):  # torch.func maps no other kernel of attention
            (whole, outputs), inputs = mapped(others, zeros, *examples)
        gradients = _Gradients(whole, {})
        for name, given in inputs.items():
            gradients.add_layer(layers[name], *layers[name].gradient(given, outputs[name]))
        return gradients

    def _of_one(self, parameters: Tensors, example: Batch) -> Tensors:
        """The gradient of a batch of one example, by a pass of its own."""
        mine = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
        value = self._losses.of(mine, self._losses.buffers_now(), example)
        gradients = torch.autograd.grad(value, [*mine.values()], allow_unused=True)
        return {
            name: torch.zeros_like(tensor) if g is None else g.to_dense() if g.is_sparse else g
            for (name, tensor), g in zip(mine.items(), gradients, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients of single examples."""

    whole: Tensors
    """[examples, ...] by parameter."""
    products: dict[str, tuple[Tensor, Tensor]]
    """(a [examples, in], b [examples, out]) by weight, whose gradients are b a^T."""

    def add_layer(self, layer: Layer, a: Tensor, b: Tensor) -> None:
        """Add those of a layer: a [examples, in, positions], b [examples, out, positions]."""
        if layer.bias:
            self.whole[layer.bias] = b.sum(2)
        if a.shape[2] == 1:
            self.products[layer.weight] = a[..., 0], b[..., 0]
        else:
            wide = torch.promote_types(a.dtype, b.dtype)
            self.whole[layer.weight] = b.to(wide) @ a.to(wide).transpose(1, 2)

    def add_clipped(self, total: Tensors, clip: float) -> None:
        """Add each gradient, shortened to the clip, to the total. Parameters that have none get nothing."""
        factors = self._factors(clip)
        for name, g in self.whole.items():
            flat = g.flatten(1).to(total[name].dtype)
            total[name] += (factors.to(flat.dtype) @ flat).view_as(total[name])
        for name, pair in self.products.items():
            a, b = (tensor.to(total[name].dtype) for tensor in pair)
            total[name] += ((factors[:, None].to(b.dtype) * b).T @ a).view_as(total[name])

    def _factors(self, clip: float) -> Tensor:
        """min(1, C / ||g_i||) of each example, [examples]; 0 where it is not finite, whose gradients become zero."""
        norms = [_norms(g) for g in self.whole.values()]
        norms += [_norms(a) * _norms(b) for a, b in self.products.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        finite = norm.isfinite()
        if not bool(finite.all()):
            for g in (*self.whole.values(), *(tensor for pair in self.products.values() for tensor in pair)):
                g[~finite] = 0.0
        return torch.where(finite, clip / norm.clamp(min=clip), 0.0)


def _norms(gradients: Tensor) -> Tensor:
    """The L2 norm of each row, [rows], float64."""
    norms: Tensor = torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=_wide(gradients)).double()
    return norms


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


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
