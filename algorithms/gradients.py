"""Gradients of a model's loss: of a mini-batch, at the model's values or at another point, and of the whole local set.

A second pass over a mini-batch repeats the first one: the same examples and the same dropout mask (the random state is
restored), and batch-norm statistics are restored after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.ascent import ascent
from algorithms.base import GradientRule, InputAscent, LocalRule, LocalSettings, Tensors
from algorithms.batches import Batch, Forward, examples_of, forward_pair, is_pair, split, to_device
from algorithms.model_state import trainable_parameters
from algorithms.parameters import AlgorithmError
from algorithms.precision import LossScale, low_dtypes, rounded_like, widened

Loss = Callable[[Any, Any], Tensor]
"""(output, target), as the forward pass returns them -> mean loss of the batch, of shape []."""

Batches = Iterable[Batch]
"""Pairs (inputs, targets), or what the forward pass takes, on any device."""


class Processes(Protocol):
    """The processes that compute each batch together. Each has the same model and the same batches."""

    @property
    def rank(self) -> int:
        """The number of this one, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, which call this with tensors of the same shapes."""
        ...


def clipped(g: Tensors, settings: LocalSettings, into: Tensors | None = None) -> Tensors:
    """clip(g), with one norm over all parameters, which stays on its device."""
    return tree.scale(g, settings.clip_factor(tree.norm(g)), into) if settings.clips else g


def decayed(g: Tensors, y: Tensors, settings: LocalSettings, into: Tensors | None = None) -> Tensors:
    """g + wd * y."""
    return tree.add(g, y, settings.weight_decay, into) if settings.weight_decay else g


class BatchGradients:
    """Computes g for successive mini-batches while the model moves."""

    def __init__(  # noqa: PLR0913, PLR0917 - as train_locally
        self,
        model: nn.Module,
        loss: Loss,
        settings: LocalSettings,
        rule: LocalRule,
        forward: Forward = forward_pair,
        processes: Processes | None = None,
    ) -> None:
        if processes is not None and rule.ascent is not None:
            raise AlgorithmError(
                "expected processes = 1 on this device, because this method ascends the inputs of the whole batch"
            )
        self._model, self._processes = model, processes
        self._loss = loss
        self._forward = forward
        self._settings = settings
        self._gradient = rule.gradient
        self._ascent = rule.ascent
        self._replays = rule.gradient.rho > 0.0 or rule.anchored
        self._scale = None
        self._parameters = trainable_parameters(model)
        self._y = tree.map(torch.detach, self._parameters)
        self._device = next(iter(self._y.values())).device
        if settings.scaled_loss and not low_dtypes(self._y):
            if rule.ascent is not None:
                raise AlgorithmError(
                    "expected precision = float32 or bfloat16 on this device, because this method ascends the loss, "
                    "which float16 scales"
                )
            self._scale = LossScale(list(self._parameters.values()), self._device)
        self._g_out, self._replay_out = tree.scratch(self._y), tree.scratch(self._y)
        self.ascended: Tensors = {} if rule.ascent is None else rule.ascent.parameters

    def compute(self, batch: Batch) -> tuple[Tensor, Tensors]:
        """The loss at y and g. Do not write into g: its tensors may share memory. It is valid until the next call."""
        batch = to_device(batch, self._device)
        if not examples_of(batch):
            raise ValueError("expected at least one example in every batch, got a batch of none; leave it out")
        if self._replays:
            self._random = _random_state(self._device)
        if self._ascent is None:
            value = self._pass(batch)
        else:
            value, batch = self._ascend_inputs(self._ascent, batch)
        self._batch = batch
        g = self._read_gradients()
        if self._gradient.rho:
            step = ascent(g, self._gradient, self._g_out)
            g = self._gradients_at(tree.add(self._y, step, into=self._g_out))
        return value, self._clipped_and_decayed(g, self._y, self._g_out)

    def recompute_at(self, point: Tensors) -> Tensors:
        """g of the latest mini-batch at another point than y."""
        return self._clipped_and_decayed(self._gradients_at(point), point, self._replay_out)

    def _clipped_and_decayed(self, g: Tensors, point: Tensors, into: Tensors | None) -> Tensors:
        if self._gradient.order == "feddyn_code":
            return g
        return decayed(clipped(g, self._settings, into), point, self._settings, into)

    def _pass(self, batch: Batch, *, shared: bool = False) -> Tensor:
        """The mean loss of a batch; the gradients are in the parameters then.

        shared: the parts of the batch have a common graph, that of an input map.
        """
        if self._scale is None:
            return self._backward(batch, torch.Tensor.backward, shared=shared)
        buffers, random = _SavedBuffers(self._model), _random_state(self._device)
        while True:
            value = self._backward(batch, self._scale.backward, shared=shared)
            if self._scale.unscale():
                return value
            # The scaled gradients overflowed: the same batch again, with a smaller scale.
            buffers.restore()
            _set_random_state(self._device, random)

    def _backward(self, batch: Batch, backward: Callable[..., object], *, shared: bool) -> Tensor:
        """One forward and backward pass, in parts if batches have them; their gradients add up to the batch's."""
        parts = self._parts_of(batch)
        if len(parts) == 1 and self._processes is None:
            value = self._loss_of(batch)
            self._forget_gradients()
            backward(value)
            return value.detach()
        self._forget_gradients()
        total, examples = torch.zeros((), device=self._device), examples_of(batch)
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            value = self._loss_of(part) * (examples_of(part) / examples)
            backward(value, retain_graph=shared and left > 0)
            total = total + value.detach()
        if self._processes is not None:
            gradients = self._read_gradients()
            for name, parameter in self._parameters.items():
                parameter.grad = gradients[name]
            self._processes.add_up([*gradients.values(), total])
        return total

    def _parts_of(self, batch: Batch) -> list[Batch]:
        """The parts of a batch that this process computes one after the other. It may have none."""
        if (group := self._processes) is not None:
            own = split(batch, -(-examples_of(batch) // group.size))[group.rank : group.rank + 1]
            if not own:
                return []
            batch = own[0]
        size = self._settings.micro_batch_size
        return split(batch, size) if size else [batch]

    def _loss_of(self, batch: Batch) -> Tensor:
        """The loss as a tensor to differentiate. Raises ValueError for anything else, which autograd names badly."""
        value: object = self._loss(*self._forward(self._model, batch))
        if not isinstance(value, Tensor):
            raise ValueError(
                "loss(): expected a tensor with one number, the mean loss of the batch, got"
                f" {'None: is there a return?' if value is None else type(value).__name__}"
            )
        if value.numel() != 1:
            raise ValueError(
                "loss(): expected a tensor with one number, the mean loss of the batch, got one of shape"
                f" {list(value.shape)}: use .mean(), or reduction='mean'"
            )
        if not value.requires_grad:
            raise ValueError(
                "loss(): expected a tensor that depends on the model's parameters, got one without a gradient: it was"
                " detached, or computed by .item(), numpy or under no_grad"
            )
        return value

    def _forget_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _read_gradients(self) -> Tensors:
        """The gradients from autograd; zero for a parameter that the loss does not depend on."""
        return tree.map(gradient_or_zero, self._parameters)

    def _gradients_at(self, point: Tensors) -> Tensors:
        buffers = _SavedBuffers(self._model)
        _set_random_state(self._device, self._random)
        with self._moved_to(point):
            self._pass(self._batch)
        buffers.restore()
        return self._read_gradients()

    @contextmanager
    def _moved_to(self, point: Tensors) -> Iterator[None]:
        """Within the context the parameters have the values of `point`."""
        if self._g_out is not None:
            # On a CPU exchange their memory, which costs nothing.
            self._use(point)
            try:
                yield
            finally:
                self._use(self._y)
        else:
            # On a GPU recurrent layers need the memory that they have prepared.
            y = tree.map(torch.clone, self._y)
            tree.copy_(self._y, point)
            yield
            tree.copy_(self._y, y)

    def _use(self, point: Tensors) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = point[name]

    def _ascend_inputs(self, ascent: InputAscent, batch: Batch) -> tuple[Tensor, Batch]:
        """One pass for both: gradients of the model, and an ascent step of the input map."""
        if not is_pair(batch):
            raise AlgorithmError(
                "expected batches that are pairs of tensors (inputs, targets), because this method transforms the "
                f"inputs, got a batch of type {type(batch).__name__}; choose another method for this task"
            )
        inputs, targets = batch
        start = self.ascended or ascent.start(inputs)
        parameters = {name: tensor.to(self._device).detach().requires_grad_() for name, tensor in start.items()}
        mapped = ascent.apply(inputs, parameters)
        value = self._pass((mapped, targets), shared=True)
        slopes = {name: gradient_or_zero(tensor) for name, tensor in parameters.items()}
        self.ascended = ascent.ascend(tree.map(torch.detach, parameters), slopes)
        return value, (mapped.detach(), targets)


def full_gradient(  # noqa: PLR0913, PLR0917 - the parameters of train_locally
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    settings: LocalSettings,
    rule: GradientRule,
    *,
    on_batch: Callable[[int], object] | None = None,
    forward: Forward = forward_pair,
    processes: Processes | None = None,
) -> Tensors:
    """g over the whole local set at the model's values: the mean over examples of each batch's g.

    Each batch's g is computed as in a local step, dropout included. Model, buffers and random state stay unchanged.

    on_batch: called after each batch with its number, from 0. Its exceptions end the pass. forward, processes: as in
    `LocalOptions`.

    Raises:
        ValueError: there is no batch, or a batch has no example.
    """
    gradients = BatchGradients(model, loss, settings, LocalRule(gradient=rule), forward, processes)
    buffers = _SavedBuffers(model)
    device = next(model.parameters()).device
    total, examples = None, 0
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for number, batch in enumerate(batches):
            size = examples_of(batch)
            g = tree.scale(widened(gradients.compute(batch)[1]), float(size))
            total, examples = g if total is None else tree.add(total, g), examples + size
            if on_batch is not None:
                on_batch(number)
    model.zero_grad()
    buffers.restore()
    if total is None:
        raise ValueError("expected at least one batch for a full gradient, got none; does this client hold examples?")
    return rounded_like(trainable_parameters(model), tree.scale(total, 1.0 / examples))


def gradient_or_zero(parameter: Tensor) -> Tensor:
    """The parameter's gradient as a dense tensor; zero if it has none."""
    if (gradient := parameter.grad) is None:
        return torch.zeros_like(parameter)
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


class _SavedBuffers:
    """Copies of all buffers of a model, to restore them later."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        for buffer, before in self._pairs:
            buffer.copy_(before)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
