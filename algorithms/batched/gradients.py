"""Gradients of many clients' mini-batches, at their values or at another point: `algorithms.gradients` in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms import tree
from algorithms.base import GradientRule, InputAscent, LocalSettings, Tensors
from algorithms.batched import stacked
from algorithms.batched.batches import NotBatched
from algorithms.batched.modules import RandomStream
from algorithms.batched.strategies import Inputs, Outputs, Strategy
from algorithms.batches import Batch, examples_of, is_pair, to_device
from algorithms.precision import rounded, widened


@dataclass(frozen=True, slots=True)
class Settings:
    """How all clients of a stack compute g."""

    local: LocalSettings
    gradient: GradientRule
    replays: bool
    """A batch may be computed at a second point."""
    dtypes: dict[str, torch.dtype]
    """The model's dtypes of the parameters that are kept in a higher precision."""


class StackedGradients:
    """Computes g of successive mini-batches for the first clients of a stack."""

    def __init__(  # noqa: PLR0913, PLR0917 - what belongs to the clients of a stack
        self,
        strategy: Strategy,
        settings: Settings,
        buffers: Tensors,
        streams: Sequence[RandomStream],
        ascents: Sequence[InputAscent | None] = (),
    ) -> None:
        """buffers: [clients, ...], changed in place; streams, ascents: one for each client."""
        self._strategy, self._settings, self._buffers, self._streams = strategy, settings, buffers, streams
        self._ascents = [ascent for ascent in ascents if ascent is not None]
        self.ascended: list[Tensors] = [ascent.parameters for ascent in self._ascents]
        """Current parameters of each client's input map."""
        self._batches: list[Batch] = []
        self._random: list[tuple[Tensor, Tensor | None]] = []

    def compute(self, y: Tensors, batches: Sequence[Batch]) -> tuple[Tensors, Tensor]:
        """(g at y, the losses there [clients]). y: [clients, ...] of the first clients; batches: one for each.

        Raises:
            NotBatched: a rule transforms the inputs, and a batch is not a pair of tensors.
            ValueError: a batch has no example.
        """
        device = next(iter(y.values())).device
        self._batches = [to_device(batch, device) for batch in batches]
        if not all(examples_of(batch) for batch in self._batches):
            raise ValueError("expected at least one example in every batch, got a batch of none; leave it out")
        if self._settings.replays:
            self._random = [stream.state for stream in self._streams[: len(batches)]]
        outputs = self._ascend_inputs(y) if self._ascents else self._pass(y, self._batches)
        g = outputs.gradients
        if self._settings.gradient.rho:
            g = self._replayed_at(stacked.add(y, widened(_ascent(g, self._settings.gradient))))
        return self._clipped_and_decayed(g, y), outputs.losses

    def recompute_at(self, point: Tensors) -> Tensors:
        """g of the latest mini-batches at another point."""
        return self._clipped_and_decayed(self._replayed_at(point), point)

    def _clipped_and_decayed(self, g: Tensors, point: Tensors) -> Tensors:
        settings = self._settings.local
        g = widened(g)
        if self._settings.gradient.order == "feddyn_code":
            return g
        g = stacked.clipped(g, settings.max_gradient_norm)
        return tree.add(g, point, settings.weight_decay) if settings.weight_decay else g

    def _pass(self, y: Tensors, batches: Sequence[Batch], also: Sequence[Tensor] = ()) -> Outputs:
        clients = len(batches)
        leaves = {name: each.detach().requires_grad_() for name, each in rounded(y, self._settings.dtypes).items()}
        buffers = stacked.first(self._buffers, clients)
        return self._strategy.compute(Inputs(leaves, buffers, batches, self._streams[:clients], also))

    def _replayed_at(self, point: Tensors) -> Tensors:
        """The gradients of the latest batches at a point, with the same random numbers; buffers stay."""
        before = tree.map(torch.clone, self._buffers)
        for stream, state in zip(self._streams, self._random, strict=False):
            stream.state = state
        g = self._pass(point, self._batches).gradients
        if before:
            tree.copy_(self._buffers, before)
        return g

    def _ascend_inputs(self, y: Tensors) -> Outputs:
        """One pass for both: gradients of the models, and an ascent step of the clients' input maps."""
        mapped, leaves = [], []
        for position, (batch, ascent) in enumerate(zip(self._batches, self._ascents, strict=False)):
            if not is_pair(batch):
                raise NotBatched("expected batches (inputs, targets), because the method transforms the inputs")
            inputs, targets = batch
            start = self.ascended[position] or ascent.start(inputs)
            parameters = {name: each.to(inputs.device).detach().requires_grad_() for name, each in start.items()}
            mapped.append((ascent.apply(inputs, parameters), targets))
            leaves.append(parameters)
        outputs = self._pass(y, mapped, [leaf for each in leaves for leaf in each.values()])
        slopes = iter(outputs.also)
        for position, parameters in enumerate(leaves):
            slope = {name: next(slopes) for name in parameters}
            self.ascended[position] = self._ascents[position].ascend(tree.map(torch.detach, parameters), slope)
        self._batches = [(inputs.detach(), targets) for inputs, targets in mapped]
        return replace(outputs, also=[])


def _ascent(g: Tensors, rule: GradientRule) -> Tensors:
    """rho * g / (||g|| + 1e-12) with each client's own norm; 0 for g = 0."""
    if rule.scope == "tensor":
        return {
            name: next(iter(stacked.scale({name: each}, rule.rho / (stacked.each_norm(each) + 1e-12)).values()))
            for name, each in g.items()
        }
    return stacked.scale(g, rule.rho / (stacked.norms(g) + 1e-12))
