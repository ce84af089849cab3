"""Gradients of one model's loss: of a mini-batch at the model's point or at another one, and of the whole local set.

A second pass over a mini-batch sees what the first one saw: the same examples, the same dropout mask (the random state
is put back), and batch norm's statistics as they were before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.base import GradientRule, InputAscent, LocalRule, LocalSettings, Tensors
from algorithms.model_state import trainable_parameters

Loss = Callable[[Tensor, Tensor], Tensor]
"""(output, targets) -> mean loss of the batch, of shape []."""

Batches = Iterable[tuple[Tensor, Tensor]]
"""(inputs, targets); they may be on another device than the model."""


def clipped(g: Tensors, settings: LocalSettings, into: Tensors | None = None) -> Tensors:
    """g * min(1, C / (||g|| + 1e-6)), one norm over all parameters, without waiting for it."""
    if not settings.max_gradient_norm:
        return g
    return tree.scale(g, (settings.max_gradient_norm / (tree.norm(g) + 1e-6)).clamp(max=1.0), into)


def decayed(g: Tensors, y: Tensors, settings: LocalSettings, into: Tensors | None = None) -> Tensors:
    """g + wd * y."""
    return tree.add(g, y, settings.weight_decay, into) if settings.weight_decay else g


class BatchGradients:
    """g of one mini-batch after the other, while the model moves."""

    def __init__(self, model: nn.Module, loss: Loss, settings: LocalSettings, rule: LocalRule) -> None:
        self._model = model
        self._loss = loss
        self._settings = settings
        self._gradient = rule.gradient
        self._ascent = rule.ascent
        self._replays = rule.gradient.rho > 0.0 or rule.anchored
        self._parameters = trainable_parameters(model)
        self._y = tree.map(torch.detach, self._parameters)
        self._device = next(iter(self._y.values())).device
        self._for_g, self._for_replay = tree.spare(self._y), tree.spare(self._y)
        self.ascended: Tensors = {} if rule.ascent is None else rule.ascent.parameters

    def take(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensors]:
        """The loss at y before any step, and g, which is not to be written into: its tensors may share memory.

        It is good until the next one is taken.
        """
        inputs, targets = inputs.to(self._device), targets.to(self._device)
        if self._replays:
            self._random = _random_state(self._device)
        if self._ascent is None:
            value = self._pass(inputs, targets)
        else:
            value, inputs = self._climbed(self._ascent, inputs, targets)
        self._batch = inputs, targets
        g = self._left()
        if self._gradient.rho:
            climb = _ascent(g, self._gradient, self._for_g)
            g = self._replayed(tree.add(self._y, climb, into=self._for_g))
        return value, self._shaped(g, self._y, self._for_g)

    def again_at(self, point: Tensors) -> Tensors:
        """g of the mini-batch that was last taken, at another point than y."""
        return self._shaped(self._replayed(point), point, self._for_replay)

    def _shaped(self, g: Tensors, point: Tensors, into: Tensors | None) -> Tensors:
        if self._gradient.order == "feddyn_code":
            return g
        return decayed(clipped(g, self._settings, into), point, self._settings, into)

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        value = self._loss(self._model(inputs), targets)
        for parameter in self._parameters.values():
            parameter.grad = None
        value.backward()
        return value.detach()

    def _left(self) -> Tensors:
        """The gradients that autograd left, zero for a parameter that the loss did not reach."""
        return tree.map(gradient_or_zero, self._parameters)

    def _replayed(self, point: Tensors) -> Tensors:
        buffers = _Buffers(self._model)
        _set_random_state(self._device, self._random)
        with self._standing_at(point):
            self._pass(*self._batch)
        buffers.put_back()
        return self._left()

    @contextmanager
    def _standing_at(self, point: Tensors) -> Iterator[None]:
        """The parameters have the values of `point` meanwhile."""
        if self._for_g is not None:
            # On a CPU their memory is exchanged, which costs nothing.
            self._put(point)
            try:
                yield
            finally:
                self._put(self._y)
        else:
            # On a GPU recurrent layers want the memory that they have prepared.
            y = tree.map(torch.clone, self._y)
            tree.copy_(self._y, point)
            yield
            tree.copy_(self._y, y)

    def _put(self, point: Tensors) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = point[name]

    def _climbed(self, ascent: InputAscent, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One pass for both players: gradients for the model, and a step up for the map of the inputs."""
        start = self.ascended or ascent.start(inputs)
        parameters = {name: tensor.to(self._device).detach().requires_grad_() for name, tensor in start.items()}
        seen = ascent.apply(inputs, parameters)
        value = self._pass(seen, targets)
        slopes = {name: gradient_or_zero(tensor) for name, tensor in parameters.items()}
        self.ascended = ascent.ascend(tree.map(torch.detach, parameters), slopes)
        return value, seen.detach()


def full_gradient(  # noqa: PLR0913, PLR0917 - as local training has them
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    settings: LocalSettings,
    rule: GradientRule,
    *,
    on_batch: Callable[[int], object] | None = None,
) -> Tensors:
    """g over the whole local set at the model's point: the mean over examples of each batch's g, made as a step's is.

    The model, its buffers and the random state are left as they were; dropout is that of training.

    on_batch: called after each batch with its number from 0 on; what it raises ends the pass.

    Raises:
        ValueError: there was no batch.
    """
    taker, buffers = BatchGradients(model, loss, settings, LocalRule(gradient=rule)), _Buffers(model)
    device = next(model.parameters()).device
    total, examples = None, 0
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for number, (inputs, targets) in enumerate(batches):
            g = tree.scale(taker.take(inputs, targets)[1], float(len(inputs)))
            total, examples = g if total is None else tree.add(total, g), examples + len(inputs)
            if on_batch is not None:
                on_batch(number)
    model.zero_grad()
    buffers.put_back()
    if total is None:
        raise ValueError("expected at least one batch for a full gradient, got none; does this client hold examples?")
    return tree.scale(total, 1.0 / examples)


def gradient_or_zero(parameter: Tensor) -> Tensor:
    """The gradient that autograd left, as a dense tensor."""
    if (gradient := parameter.grad) is None:
        return torch.zeros_like(parameter)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _ascent(g: Tensors, rule: GradientRule, into: Tensors | None) -> Tensors:
    """rho * g / (||g|| + 1e-12): where g = 0 it is 0."""
    if rule.scope == "tensor":
        return tree.map(lambda tensor: tensor * (rule.rho / (torch.linalg.vector_norm(tensor) + 1e-12)), g)
    return tree.scale(g, rule.rho / (tree.norm(g) + 1e-12), into)


class _Buffers:
    """All buffers of a model as they are now, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def put_back(self) -> None:
        for buffer, before in self._pairs:
            buffer.copy_(before)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
