"""ProxSkip for federated learning (Scaffnew): clients communicate after each local step with probability p.

    every step, all clients    yh_i = y_i - gamma * (g_i(y_i) - h_i)                                sum_i h_i = 0
    with probability p         x    = mean_i (yh_i - gamma / p * h_i) = mean_i yh_i
                               h_i  <- h_i + (p / gamma) * (x - yh_i),   y_i = x                    communication
    otherwise                  y_i  = yh_i                                                          skipped

p is the probability to COMMUNICATE. So a round has K_t ~ Geometric(p) local steps, P(K_t = k) = (1 - p)^(k - 1) p, the
same number for all clients, and all N clients take part in every round. A run draws K_t from its seed and the round.
Whoever calls `run_round` gives each client the batches of a number that it draws so itself. p = 1 is gradient descent,
and p = 1 / sqrt(condition number) needs the fewest rounds.

With gamma = eta_l, delta_i = yh_i - x_t and h_i = c_i - c_t, this is SCAFFOLD's option II, where the mean number of
steps 1/p takes the place of K_t:

    client     d    = g - c_i + c_t                             c_i+ = c_i - c_t - (p / gamma) * delta_i
    server     x_{t+1} = x_t + eta_g * mean_i delta_i           c_{t+1} = mean_i c_i+

since c_i+ - c_{t+1} = h_i - (p / gamma) * (delta_i - mean_j delta_j). It reaches the exact optimum at a constant rate.

Mishchenko, Malinovsky, Stich, Richtarik: ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
Acceleration! Finally!, ICML 2022, algorithm 2.
"""

from __future__ import annotations

from algorithms.compose import Method
from algorithms.methods.scaffold import control_variates
from algorithms.parameters import Share


def proxskip(p: Share = 0.1) -> Method:
    """p: the probability to communicate after a local step; the mean number of a round's steps is 1/p."""
    return Method(control_variates("II", "uniform", p), "uniform")
