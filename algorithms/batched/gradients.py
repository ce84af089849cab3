"""Gradients of many clients' mini-batches, at their values or at another point: `algorithms.gradients` in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms import tree
from algorithms.ascent import ascent_in_norm
from algorithms.base import GradientRule, InputAscent, LocalSettings, Tensors
from algorithms.batched import stacked
from algorithms.batched.batches import NotBatched, StepBatches, stacked_batches
from algorithms.batched.modules import Numbers
from algorithms.batched.strategies import Inputs, Outputs, Strategy
from algorithms.batches import is_pair, map_leaves
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
        numbers: Numbers,
        ascents: Sequence[InputAscent] = (),
    ) -> None:
        """buffers: [clients, ...], changed in place; numbers: of the clients; ascents: one for each client, or none."""
        self._strategy, self._settings, self._buffers, self._numbers = strategy, settings, buffers, numbers
        self._ascents = ascents
        self.ascended: list[Tensors] = [ascent.parameters for ascent in ascents]
        """Current parameters of each client's input map."""
        self._mark: object = None

    def compute(self, y: Tensors, batches: StepBatches) -> tuple[Tensors, Tensor]:
        """(g at y, the losses there [clients]). y: [clients, ...] of the first clients; batches: one for each.

        Raises NotBatched: the method transforms inputs, and a batch is not a pair of tensors.
        """
        self._batches = batches
        if self._settings.replays:
            self._mark = self._numbers.mark()
        outputs = self._ascend_inputs(y) if self._ascents else self._pass(y, batches)
        g = outputs.gradients
        if self._settings.gradient.rho:
            g = self._replayed_at(tree.add(y, widened(_ascent(g, self._settings.gradient))))
        return self._clipped_and_decayed(g, y), outputs.losses

    def recompute_at(self, point: Tensors) -> Tensors:
        """g of the latest mini-batches at another point."""
        return self._clipped_and_decayed(self._replayed_at(point), point)

    def _clipped_and_decayed(self, g: Tensors, point: Tensors) -> Tensors:
        settings = self._settings.local
        g = widened(g)
        if self._settings.gradient.order == "feddyn_code":
            return g
        g = stacked.clipped(g, settings)
        return tree.add(g, point, settings.weight_decay) if settings.weight_decay else g

    def _pass(self, y: Tensors, batches: StepBatches, also: Sequence[Tensor] = ()) -> Outputs:
        clients = len(next(iter(y.values())))
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in rounded(y, self._settings.dtypes).items()}
        buffers = stacked.first(self._buffers, clients)
        return self._strategy.compute(Inputs(leaves, buffers, batches, self._numbers.of(range(clients)), also))

    def _replayed_at(self, point: Tensors) -> Tensors:
        """The gradients of the latest batches at a point, with the same random numbers; buffers stay."""
        before = tree.map(torch.clone, self._buffers)
        self._numbers.go_back(self._mark)
        g = self._pass(point, self._batches).gradients
        if before:
            tree.copy_(self._buffers, before)
        return g

    def _ascend_inputs(self, y: Tensors) -> Outputs:
        """One pass for both: gradients of the models, and an ascent step of the clients' input maps."""
        mapped, leaves = [], []
        for position in range(len(next(iter(y.values())))):
            batch, ascent = self._batches.of_client(position), self._ascents[position]
            if not is_pair(batch):
                raise NotBatched("the method transforms inputs, and batches are no pairs (inputs, targets)")
            inputs, targets = batch
            start = self.ascended[position] or ascent.start(inputs)
            parameters = {name: tensor.to(inputs.device).detach().requires_grad_() for name, tensor in start.items()}
            mapped.append((ascent.apply(inputs, parameters), targets))
            leaves.append(parameters)
        batches = stacked_batches(mapped)
        outputs = self._pass(y, batches, [leaf for parameters in leaves for leaf in parameters.values()])
        slopes = iter(outputs.also)
        for position, parameters in enumerate(leaves):
            slope = {name: next(slopes) for name in parameters}
            self.ascended[position] = self._ascents[position].ascend(tree.map(torch.detach, parameters), slope)
        self._batches = replace(batches, batch=map_leaves(torch.detach, batches.batch))
        return replace(outputs, also=[])


def _ascent(g: Tensors, rule: GradientRule) -> Tensors:
    """rho * g / (||g|| + 1e-12) with each client's own norm, or that of another norm; 0 for g = 0."""
    if rule.p != 2.0:
        return ascent_in_norm(g, rule)
    if rule.scope == "tensor":
        return {
            name: next(iter(stacked.scale({name: slope}, rule.rho / (stacked.each_norm(slope) + 1e-12)).values()))
            for name, slope in g.items()
        }
    return stacked.scale(g, rule.rho / (stacked.norms(g) + 1e-12))
