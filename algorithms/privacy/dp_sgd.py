"""DP-SGD (Abadi et al. 2016): g = (sum_i clip(g_i) + z C xi) / (q n), with Poisson batches and xi ~ N(0, I).

Each of the n examples is in a batch by itself with the probability q. The sum is divided by the expected size q n, not
by the size that was drawn, which stays unknown. So an example changes a step by at most C / (q n), and whoever sees all
steps learns about it what the Gaussian mechanism with the noise multiplier z reveals. What comes after the noise, such
as weight decay, the server's direction and the local optimizer, uses no example and reveals nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.base import Algorithm, LocalRule, LocalSettings, Tensors
from algorithms.batches import Batch, Forward, to_device
from algorithms.parameters import AlgorithmError
from algorithms.precision import rounded_like
from algorithms.privacy.per_example import ClippedGradients, Clipping
from algorithms.privacy.random_bits import RandomBytes, normals


@dataclass(frozen=True, slots=True)
class Privacy:
    """The mechanism of all steps of one client and round."""

    noise_multiplier: float
    """z: the noise of a sum has the standard deviation z C. At least 0; without noise nothing is private."""
    clip: float
    """C, greater than 0."""
    rate: float
    """q: the probability of an example to be in a batch, over 0 and at most 1."""
    examples: int
    """n, which is public; greater than 0."""
    random: RandomBytes = field(repr=False)
    """The secret stream of batches and noise."""

    def __post_init__(self) -> None:
        for name, value in (("noise multiplier", self.noise_multiplier), ("clip", self.clip)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"expected a {name} of 0 or more, got {value}")
        if not self.clip or not 0.0 < self.rate <= 1.0 or self.examples < 1:
            raise ValueError(f"expected a clip over 0, a rate over 0 and at most 1, and examples, got {self}")

    @property
    def batch_size(self) -> float:
        """q n, the expected examples of a batch."""
        return self.rate * self.examples


def conflict(algorithm: Algorithm) -> str:
    """Why the local steps of a method reveal more of an example than DP-SGD accounts for; empty if they do not."""
    if algorithm.gradient.rho:
        return "its ascent step depends on the whole batch, without noise"
    if any(exchange.passes for exchange in algorithm.exchanges):
        return "it sends a gradient of all local examples, without noise"
    if algorithm.keeps_client_state:
        return "each client keeps a state from round to round, which is not accounted for"
    if algorithm.gradient.order != "paper":
        return "it mixes the gradient with other terms before it is clipped"
    return ""


def check_method(algorithm: Algorithm) -> None:
    """Raises AlgorithmError, with the reason, for a method that cannot have private steps."""
    if why := conflict(algorithm):
        raise AlgorithmError(f"expected a method whose steps DP-SGD can make private, such as fedavg or fedcm: {why}")


def check_settings(settings: LocalSettings) -> None:
    """Raises AlgorithmError for settings of local steps that do not go with DP-SGD."""
    if settings.max_gradient_norm:
        raise AlgorithmError(
            "expected max_gradient_norm = 0 with DP-SGD, whose clip limits the gradient of each example, got"
            f" {settings.max_gradient_norm:g}"
        )
    if settings.scaled_loss:
        raise AlgorithmError(
            "expected precision = float32 or bfloat16 on this device with DP-SGD: float16 scales the loss"
        )


def check_rule(rule: LocalRule) -> None:
    """Raises AlgorithmError for a local rule that uses examples in another way than by one gradient of each batch."""
    if rule.anchored or rule.ascent is not None or rule.gradient.rho:
        raise AlgorithmError(
            "expected a method with one gradient for each step, because DP-SGD accounts for one: this one computes the"
            " batch at a second point, or changes the inputs along their gradient"
        )


class PrivateGradients:
    """Computes g for successive Poisson batches while the model moves, as `algorithms.gradients.BatchGradients`."""

    def __init__(  # noqa: PLR0913, PLR0917 - as BatchGradients
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        settings: LocalSettings,
        rule: LocalRule,
        forward: Forward,
        privacy: Privacy,
    ) -> None:
        """Raises AlgorithmError for a model, settings or a rule that do not go with DP-SGD."""
        check_settings(settings)
        check_rule(rule)
        self._privacy, self._decay = privacy, settings.weight_decay
        self._gradients = ClippedGradients(model, loss, forward, Clipping(privacy.clip, settings.micro_batch_size))
        self._y = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
        self._device = next(iter(self._y.values())).device
        self._step = 0
        self.ascended: Tensors = {}

    def compute(self, batch: Batch) -> tuple[Tensor, Tensors]:
        """(0, g): no loss is measured, for it would have no noise. The batch may have no example."""
        privacy = self._privacy
        total = self._gradients.sum(to_device(batch, self._device))
        g = {name: tensor / privacy.batch_size for name, tensor in self._noised(total).items()}
        if self._decay:
            g = {name: tensor + self._decay * self._y[name] for name, tensor in g.items()}
        self._step += 1
        return torch.zeros((), device=self._device), rounded_like(self._y, g)

    def recompute_at(self, point: Tensors) -> Tensors:
        """No method with a second gradient of a batch is private; `check_rule` refuses it."""
        raise AlgorithmError(f"expected no gradient at another point with DP-SGD, got one of {len(point)} tensors")

    def _noised(self, total: Tensors) -> Tensors:
        """The sum with noise in every coordinate, drawn for all tensors at once in their order."""
        privacy = self._privacy
        if not privacy.noise_multiplier:
            return total
        count = sum(tensor.numel() for tensor in total.values())
        noise = normals(privacy.random, "noise", self._step, count).mul_(privacy.noise_multiplier * privacy.clip)
        parts = noise.split([tensor.numel() for tensor in total.values()])
        return {
            name: tensor + part.view(tensor.shape).to(tensor.dtype).to(self._device)
            for (name, tensor), part in zip(total.items(), parts, strict=True)
        }
