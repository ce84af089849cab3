"""DiLoCo: many local steps of AdamW, and Nesterov's momentum on the server.

    client    H steps of AdamW, whose state stays on the device
    server    D       = uniform mean of the deltas
              v_{t+1} = beta v_t + D                                 v_0 = 0
              x_{t+1} = x_t + eta_g (D + beta v_{t+1})

The server's step is that of torch.optim.SGD(lr=eta_g, momentum=beta, nesterov=True) with the gradient -D. A run has the
local optimizer and its state by default (`fl_server.run_settings.config`).

Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105, algorithm 1.
"""

from __future__ import annotations

from algorithms.base import Weights
from algorithms.compose import Correction, Method, ServerOptimizer
from algorithms.methods.fedavgm import nesterov
from algorithms.parameters import Decay, PositivePerRound


def diloco(weights: Weights = "uniform") -> Method:
    """weights: uniform, as in the paper, or by examples; beta and eta_g are those of `outer`."""
    return Method(Correction(), weights, outer)


def outer(beta: Decay = 0.9, eta_g: PositivePerRound = 0.7) -> ServerOptimizer:
    """Nesterov's momentum with the paper's values. beta: share of v that is kept; eta_g: outer learning rate."""
    return nesterov(beta, eta_g)
