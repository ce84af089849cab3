"""How flat a model's minimum is: largest eigenvalue and trace of the Hessian, and the rise of the loss within a radius.

    L(w) = (1/n) sum_i l(w; example i)      over n fixed examples, in evaluation mode: buffers and dropout are frozen
    H v  = d/dw <dL/dw, v>                  by double backward, chunk by chunk, so that memory does not grow with n

Weight decay is not part of L. Vectors are flat [d], in float64, over the trainable parameters in the model's order;
forward and backward passes have the model's dtype and are on its device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from algorithms.base import Tensors
from algorithms.batches import Batch, Forward, examples_of, forward_pair
from algorithms.gradients import Loss
from algorithms.model_state import evaluation_mode, trainable_parameters


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """L of a model, whose values change only within a call.

    batches: chunks of the examples, on the model's device. loss: the mean over a chunk.
    """

    model: nn.Module
    loss: Loss
    batches: Sequence[Batch]
    forward: Forward = forward_pair

    def value(self) -> float:
        """L at the model's values."""
        with torch.no_grad(), _frozen(self.model):
            return math.fsum(share * float(value) for share, value in self._chunks())

    def gradient(self) -> Tensor:
        """dL/dw."""
        parameters = self._parameters()
        total = torch.zeros_like(_flat(parameters))
        with _frozen(self.model):
            for share, value in self._chunks():
                total += share * _flat(torch.autograd.grad(value, parameters, materialize_grads=True))
        return total

    def hessian_product(self, v: Tensor) -> Tensor:
        """H v."""
        parameters = self._parameters()
        parts = _parts(v, parameters)
        total = torch.zeros_like(v)
        with _frozen(self.model):
            for share, value in self._chunks():
                slopes = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
                along = torch.stack([(slope * part).sum() for slope, part in zip(slopes, parts, strict=True)]).sum()
                if along.requires_grad:  # not if the loss is linear in w
                    total += share * _flat(torch.autograd.grad(along, parameters, materialize_grads=True))
        return total

    def rise(self, rho: float) -> float:
        """SAM's measure: L(w + rho g / ||g||) - L(w), with g = dL/dw. To first order the largest within the radius."""
        g = self.gradient()
        norm = float(g.norm())
        before = self.value()
        if not norm:
            return 0.0
        parameters = self._parameters()
        with torch.no_grad(), _restored(parameters):
            for parameter, part in zip(parameters, _parts(g * (rho / norm), parameters), strict=True):
                parameter.add_(part)
            return self.value() - before

    def _parameters(self) -> list[Tensor]:
        return list(trainable_parameters(self.model).values())

    def _chunks(self) -> Iterator[tuple[float, Tensor]]:
        """(share of the examples, mean loss) of each chunk."""
        sizes = [examples_of(batch) for batch in self.batches]
        for size, batch in zip(sizes, self.batches, strict=True):
            yield size / sum(sizes), self.loss(*self.forward(self.model, batch))


@dataclass(frozen=True, slots=True)
class Eigenvalue:
    """An estimate of an eigenvalue."""

    value: float
    residual: float
    """||H u - value u|| for a unit vector u: an eigenvalue of H is within so much."""
    products: int
    """Number of Hessian-vector products."""


def largest_eigenvalue(loss: MeanLoss, iterations: int = 50, tolerance: float = 1e-3, seed: int = 0) -> Eigenvalue:
    """The algebraically largest eigenvalue of H, by Lanczos' three-term recurrence from a random vector of `seed`.

    It ends when the residual is at most tolerance * |value|, or after so many iterations. Only three vectors are kept:
    without reorthogonalization Ritz values may repeat, which changes the largest one by rounding only.
    """
    size, device = _space(loss)
    v = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)
    v /= v.norm()
    before, beta = torch.zeros_like(v), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        w = loss.hessian_product(v) - beta * before
        alpha = float(w @ v)
        w -= alpha * v
        diagonal.append(alpha)
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, beside))
        beta = float(w.norm())
        value, residual = float(values[-1]), beta * abs(float(vectors[-1, -1]))
        if residual <= tolerance * abs(value) or len(diagonal) == iterations:
            return Eigenvalue(value, residual, len(diagonal))
        beside.append(beta)
        before, v = v, w / beta


@dataclass(frozen=True, slots=True)
class Trace:
    """An estimate of a trace."""

    value: float
    standard_error: float
    """That of the mean over the probes; not a number with one probe."""


def trace(loss: MeanLoss, probes: int = 20, seed: int = 0) -> Trace:
    """The trace of H by Hutchinson: the mean of <v, H v> over vectors v of random signs, drawn from `seed`."""
    size, device = _space(loss)
    generator = torch.Generator().manual_seed(seed)
    bits = (torch.randint(0, 2, (size,), generator=generator) for _ in range(probes))
    products = quadratic_forms(loss, ((2 * drawn - 1).to(device, torch.float64) for drawn in bits))
    mean = math.fsum(products) / probes
    variance = math.fsum((product - mean) ** 2 for product in products) / (probes - 1) if probes > 1 else math.nan
    return Trace(mean, math.sqrt(variance / probes))


def quadratic_forms(loss: MeanLoss, vectors: Iterable[Tensor]) -> list[float]:
    """<v, H v> of each vector."""
    return [float(v @ loss.hessian_product(v)) for v in vectors]


def filter_normalised(model: nn.Module, seed: int) -> Tensors:
    """A random direction in the space of the trainable parameters (Li et al., 2018), as named tensors.

    Each filter, a slice along the first dimension of a weight with two or more, gets the norm of the model's own
    filter. Tensors of one dimension or none, such as biases and the weights of norms, get zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    direction: Tensors = {}
    for name, parameter in trainable_parameters(model).items():
        own = parameter.detach()
        drawn = torch.randn(own.shape, generator=generator, dtype=torch.float64).to(own)
        if own.dim() < 2:
            direction[name] = torch.zeros_like(own)
            continue
        others = tuple(range(1, own.dim()))
        norms = [torch.linalg.vector_norm(values, dim=others, keepdim=True) for values in (own, drawn)]
        direction[name] = drawn * (norms[0] / norms[1].clamp(min=torch.finfo(own.dtype).tiny))
    return direction


@contextmanager
def moved(model: nn.Module, directions: Sequence[tuple[float, Tensors]]) -> Iterator[None]:
    """The model at w + sum_i a_i d_i within the block. directions: pairs (a_i, d_i)."""
    parameters = trainable_parameters(model)
    with torch.no_grad(), _restored(list(parameters.values())):
        for a, direction in directions:
            for name, parameter in parameters.items():
                parameter.add_(direction[name], alpha=a)
        yield


def _space(loss: MeanLoss) -> tuple[int, torch.device]:
    """The number of parameters, and their device. Random vectors are drawn on the CPU, the same for every device."""
    parameters = list(trainable_parameters(loss.model).values())
    return sum(parameter.numel() for parameter in parameters), parameters[0].device


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def _parts(v: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat vector, with the shapes and dtypes of the parameters."""
    pieces = v.split([parameter.numel() for parameter in parameters])
    return [piece.reshape(own.shape).to(own.dtype) for piece, own in zip(pieces, parameters, strict=True)]


def _tridiagonal(diagonal: Sequence[float], beside: Sequence[float]) -> Tensor:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
        matrix = matrix + off + off.T
    return matrix


@contextmanager
def _restored(parameters: Sequence[Tensor]) -> Iterator[None]:
    """The parameters have their values again after the block, with the same bits."""
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with kernels that have second derivatives: not fused attention, nor cuDNN's recurrent layers."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with evaluation_mode(model), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=not recurrent):
        yield
