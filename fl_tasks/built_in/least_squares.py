"""Least squares with a known optimum, to compare methods as optimizers: each client has a problem of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_tasks.base import Examples, Shard, TaskError
from fl_tasks.metrics import Metric


class Coefficients(nn.Module):
    """x, with zeros at the start."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """[n, d] -> [n, 1 + d]: the predictions, and x beside each of them."""
        predicted = inputs @ self.x
        return torch.cat([predicted[:, None], self.x.expand(len(inputs), -1)], dim=1)


class LeastSquares:
    """f_i(x) = mean over the examples of client i of (a x - b)^2 / 2, in float64, with an example for each entry of x.

    The objective is the mean of f_i over the clients; the partition "natural" gives each client its problem. All f_i
    have the smoothness L = 1 and the strong convexity mu = 1 / condition, in directions that they have in common; their
    other curvatures, between the two, differ. So the condition number of the objective is that of each f_i, and
    clients that train alone from one point end at different ones.

    dimension: d, entries of x. clients: problems. condition: L / mu. heterogeneity: the root mean square distance of
    the clients' optima from their centre; 0: they have one optimum. seed: of the problem.

    metrics: loss; gap, the objective minus its minimum; distance, ||x - x*||. The two are exact near the optimum, too.
    """

    version = "1"
    held_out = "none: the objective itself, over the examples of all clients"
    declared_metrics = (Metric("gap", lower_is_better=True), Metric("distance", lower_is_better=True))

    def __init__(  # noqa: PLR0913 - the task's options
        self,
        dimension: int = 20,
        *,
        clients: int = 10,
        condition: float = 100.0,
        heterogeneity: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._dimension = _whole("dimension", dimension, 2)
        self._clients = _whole("clients", clients, 1)
        _check("condition", condition, 1.0)
        _check("heterogeneity", heterogeneity, 0.0)
        numbers = torch.Generator().manual_seed(_whole("seed", seed, 0))
        axes = torch.linalg.qr(_normal(numbers, dimension, dimension)).Q
        centre = _normal(numbers, dimension) / math.sqrt(dimension)
        rows, values, hessians, slopes = [], [], [], []
        for _ in range(clients):
            between = torch.rand(dimension - 2, generator=numbers, dtype=torch.float64)
            curvatures = condition ** -torch.cat([torch.tensor([0.0, 1.0], dtype=torch.float64), between])
            # No rotation of the examples changes f_i. With one, each of them depends on all entries of x.
            rotation = torch.linalg.qr(_normal(numbers, dimension, dimension)).Q
            optimum = centre + heterogeneity / math.sqrt(dimension) * _normal(numbers, dimension)
            rows.append(math.sqrt(dimension) * rotation @ (curvatures.sqrt()[:, None] * axes.T))
            values.append(rows[-1] @ optimum)
            hessians.append((axes * curvatures) @ axes.T)
            slopes.append(hessians[-1] @ optimum)
        self._examples = Examples(torch.cat(rows), torch.cat(values))
        self._hessian = torch.stack(hessians).mean(dim=0)
        self._optimum = torch.linalg.solve(self._hessian, torch.stack(slopes).mean(dim=0))

    def model(self) -> Coefficients:
        """x = 0."""
        return Coefficients(self._dimension)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean of half the squared errors."""
        return ((output[:, 0] - target) ** 2 / 2).mean()

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Half the squared errors; gap and distance have the same value for each example."""
        away = output[:, 1:] - self._optimum.to(output.device)
        gap = ((away @ self._hessian.to(output.device)) * away).sum(dim=1) / 2
        return {
            "loss": (output[:, 0] - target) ** 2 / 2,
            "gap": gap,
            "distance": torch.linalg.vector_norm(away, dim=1),
        }

    def train_data(self, shard: Shard) -> Examples:
        """The shard's rows and their values."""
        return shard.of(self._examples)

    def train_groups(self) -> Tensor:
        """The client of each example."""
        return torch.arange(self._clients).repeat_interleave(self._dimension)

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """All examples; none of a shard's own."""
        return self._examples if shard is None else self._examples[:0]


def _normal(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=numbers, dtype=torch.float64)


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TaskError(f"expected the option {name} to be a whole number of {least} or more, got {value!r}")
    return value


def _check(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise TaskError(f"expected the option {name} to be a number of {least:g} or more, got {value!r}")
