"""How the gradients of many clients are computed: together under vmap, or one after the other.

    grouped    one pass under vmap; a convolution becomes a grouped convolution
    one_by_one a pass for each client; only the local rule is applied to all clients together
    streams    the same, with passes side by side on several streams of CUDA

All compute each client's gradient of its own mean loss. Under vmap the loss may be any function of the outputs and
targets of the real examples that torch can map.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from algorithms import tree
from algorithms.base import Tensors
from algorithms.batched.batches import StepBatches, real
from algorithms.batched.modules import Numbers, dropout_by_client
from algorithms.batched.stacked import of_client
from algorithms.batches import Batch, Forward, leaves, map_leaves
from algorithms.gradients import Loss

Name = Literal["grouped", "one_by_one", "streams"]
STREAMS = 8


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step of the clients of a stack."""

    parameters: Tensors
    """[clients, ...], leaves that require gradients."""
    constants: Tensors
    """Buffers, [clients, ...]. The pass changes them in place."""
    batches: StepBatches
    """The batches, with a graph if `also` has tensors."""
    numbers: Numbers
    """Random numbers of the clients."""
    also: Sequence[Tensor] = ()
    """Other leaves of the batches' graph."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Losses [clients] before the step, and gradients of the parameters [clients, ...] and of the other leaves."""

    losses: Tensor
    gradients: Tensors
    also: list[Tensor]


class Strategy(Protocol):
    """Computes the gradients of one step."""

    def compute(self, inputs: Inputs) -> Outputs:
        """One forward and one backward pass of all clients."""
        ...


class Holder:
    """The model behind the task's forward pass, with other tensors in place of its own."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        self.model, self._forward = model, forward
        self.dropouts = [module for module in model.modules() if type(module) is nn.Dropout]
        """Under vmap no other module may draw random numbers."""
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        for module in model.modules():
            for places in (module._parameters, module._buffers):  # noqa: SLF001 - where torch.func puts them, too
                for key, tensor in places.items():
                    if tensor is not None:  # a shared tensor has several places
                        self._places.setdefault(names[id(tensor)], []).append((places, key))

    def call(self, tensors: Tensors, batch: Batch) -> tuple[Any, Any]:
        """(output, target) with these parameters and buffers, by their names in the model."""
        before = [(places, key, places[key]) for name in tensors for places, key in self._places[name]]
        try:
            for name, tensor in tensors.items():
                for places, key in self._places[name]:
                    places[key] = tensor
            return self._forward(self.model, batch)
        finally:
            for places, key, tensor in before:
                places[key] = tensor


class OneByOne:
    """A pass for each client, as it trains alone."""

    def __init__(self, holder: Holder, loss: Loss, *, streams: bool = False) -> None:
        """streams: passes run side by side on STREAMS streams, on CUDA."""
        self._holder, self._loss = holder, loss
        device = next(holder.model.parameters()).device
        self._sides = [torch.cuda.Stream(device) for _ in range(STREAMS)] if streams and device.type == "cuda" else []

    def compute(self, inputs: Inputs) -> Outputs:
        """Do what Strategy says."""
        losses, also = [], [torch.zeros_like(leaf) for leaf in inputs.also]
        gradients = tree.map(torch.empty_like, inputs.parameters)
        clients = len(next(iter(gradients.values())))
        # What the passes write is in memory of this stream, which waits for them. Sums of `also` need an order.
        sides = [] if also else self._sides
        for side in sides:
            side.wait_stream(torch.cuda.current_stream(side.device))
        for position in range(clients):
            with torch.cuda.stream(sides[position % len(sides)]) if sides else nullcontext():
                loss, slopes = self._pass(inputs, position)
                for name, slope in zip(gradients, slopes, strict=False):
                    gradients[name][position] = slope
            also = [total + slope for total, slope in zip(also, slopes[len(gradients) :], strict=True)]
            losses.append(loss)
        for side in sides:
            torch.cuda.current_stream(side.device).wait_stream(side)
        return Outputs(torch.stack(losses), gradients, also)

    def _pass(self, inputs: Inputs, position: int) -> tuple[Tensor, list[Tensor]]:
        """One client's loss, and the gradients of its parameters and of the other leaves."""
        parameters, batch = of_client(inputs.parameters, position), inputs.batches.of_client(position)
        mine = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
        weights = inputs.batches.weights
        with inputs.numbers.of_client(position):
            made = self._holder.call({**mine, **of_client(inputs.constants, position)}, batch)
            if weights is None:
                loss = self._loss(*made)
            else:
                loss = (losses_of_examples(self._loss, *made) * weights[position]).sum()
        return loss.detach(), _slopes(loss, [*mine.values(), *inputs.also], again=bool(inputs.also))


class Together:
    """One pass for all clients under vmap."""

    def __init__(self, holder: Holder, loss: Loss, *, fill: bool) -> None:
        """fill: shorter batches are filled; examples must not influence each other, and no random number be drawn."""
        self._holder, self._loss, self._fill = holder, loss, fill

    def compute(self, inputs: Inputs) -> Outputs:
        """Do what Strategy says. Raises RuntimeError or another error of torch for what it cannot map."""
        batches, tensors = inputs.batches, {**inputs.parameters, **inputs.constants}
        parts = batches.by_size()
        if len(parts) == 1 or self._fill:
            with dropout_by_client(self._holder.dropouts, inputs.numbers):
                losses = self._losses_of_all(tensors, batches)
        else:
            losses_of_parts = []
            for size, positions in parts:
                some = {name: tensor[positions] for name, tensor in tensors.items()}
                with dropout_by_client(self._holder.dropouts, inputs.numbers.of(positions)):
                    losses_of_parts.append(self._losses(some, batches.of_size(size, positions)))
                for name, tensor in inputs.constants.items():
                    tensor[positions] = some[name]
            losses = _in_order(losses_of_parts, parts)
        # No loss depends on another client's tensors, so the gradients of the sum are those of each loss.
        slopes = _slopes(losses.sum(), [*inputs.parameters.values(), *inputs.also])
        gradients = dict(zip(inputs.parameters, slopes, strict=False))
        return Outputs(losses.detach(), gradients, slopes[len(gradients) :])

    def _losses_of_all(self, tensors: Tensors, batches: StepBatches) -> Tensor:
        """The losses of all clients by one pass, [clients]. No loss depends on the copies that fill a batch."""
        if batches.weights is not None:
            weighed: Tensor = vmap(self._weighed)(tensors, batches.batch, batches.weights)
            return weighed
        parts = batches.by_size()
        if len(parts) == 1:
            return self._losses(tensors, batches.batch)
        outputs = vmap(self._holder.call)(tensors, batches.batch)
        losses_of_parts = []
        for size, positions in parts:
            chosen = map_leaves(partial(_rows, positions), outputs)
            losses_of_parts.append(vmap(partial(self._loss_of_real, size))(*chosen))
        return _in_order(losses_of_parts, parts)

    def _losses(self, tensors: Tensors, batch: Batch) -> Tensor:
        # A flat list of tensors: vmap takes as long for a nested structure as for a small network.
        losses: Tensor = vmap(partial(self._one, [*tensors], batch))(*tensors.values(), *leaves(batch))
        return losses

    def _one(self, names: Sequence[str], like: Batch, *flat: Tensor) -> Tensor:
        """The loss of one client. flat: its tensors by these names, and the parts of its batch."""
        parts = iter(flat[len(names) :])
        batch = map_leaves(lambda _: next(parts), like)
        return self._loss(*self._holder.call(dict(zip(names, flat, strict=False)), batch))

    def _weighed(self, tensors: Tensors, batch: Batch, weights: Tensor) -> Tensor:
        return (losses_of_examples(self._loss, *self._holder.call(tensors, batch)) * weights).sum()

    def _loss_of_real(self, size: int, output: Any, target: Any) -> Tensor:
        return self._loss(real(output, size), real(target, size))


def losses_of_examples(loss: Loss, output: Any, target: Any) -> Tensor:
    """The loss of each example as a batch of its own, [examples]."""

    def one(output: Any, target: Any) -> Tensor:
        return loss(*(map_leaves(lambda leaf: leaf.unsqueeze(0), parts) for parts in (output, target)))

    losses: Tensor = vmap(one)(output, target)
    return losses


def _rows(places: list[int], leaf: Tensor) -> Tensor:
    return tree.rows_of(leaf, places)


def _in_order(losses: Sequence[Tensor], parts: Sequence[tuple[int, list[int]]]) -> Tensor:
    """The losses of the parts' clients by their positions, [clients]."""
    order = torch.tensor([position for _, positions in parts for position in positions]).argsort()
    return torch.cat([*losses])[order.to(losses[0].device, non_blocking=True)]


def _slopes(value: Tensor, leaves: list[Tensor], *, again: bool = False) -> list[Tensor]:
    """The gradients of the leaves, dense; zero for a leaf that the value does not depend on.

    again: the graph is used again, as that of batches with leaves is by the passes of other clients.
    """
    slopes = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=again)
    return [
        torch.zeros_like(leaf) if slope is None else slope if slope.layout is torch.strided else slope.to_dense()
        for leaf, slope in zip(leaves, slopes, strict=True)
    ]
