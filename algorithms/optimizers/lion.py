"""Lion: the sign of an interpolation between gradient and momentum.

    c <- beta1 * m + (1 - beta1) * d
    y <- y - eta * (sign(c) + weight_decay * y)
    m <- beta2 * m + (1 - beta2) * d                m = 0 at first

Every entry moves by eta in each step, so learning rates are three to ten times smaller than Adam's.

Chen, Liang, Huang, Real, Wang, Liu, Pham, Dong, Luong, Hsieh, Lu, Le: Symbolic Discovery of Optimization Algorithms,
NeurIPS 2023, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """The optimizer as a class of torch.

    Args:
        params: as in every optimizer of torch.
        lr: eta.
        betas: beta1 and beta2, each at least 0 and below 1.
        weight_decay: decoupled from the gradient, as in AdamW; at least 0.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas) or len(betas) != 2:
            raise ValueError(f"expected two betas, at least 0 and below 1, got {betas}")
        if not weight_decay >= 0.0:
            raise ValueError(f"expected a weight decay of 0 or more, got {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                m = self.state[y].setdefault("exp_avg", torch.zeros_like(y))
                y.mul_(1.0 - group["lr"] * group["weight_decay"])
                y.add_(torch.lerp(y.grad, m, beta1).sign_(), alpha=-group["lr"])
                m.lerp_(y.grad, 1.0 - beta2)
        return loss
