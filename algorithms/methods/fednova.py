"""FedNova: normalised averaging, so that unequal local work does not change the objective.

    client    d       = g
    server    x_{t+1} = x_t + eta_g * tau_eff * sum_S p_i delta_i / tau_i,     tau_eff = sum_S p_i tau_i

tau_i is the number of effective steps, -delta_i / eta_l for a constant gradient of 1: K_i, and with a proximal term
sum_k (1 - eta_l mu)^k. With equal tau_i this is FedAvg. `normaliser = fednova` applies it to other methods.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020.
"""

from __future__ import annotations

from algorithms.base import Weights
from algorithms.compose import Correction, Method


def fednova(weights: Weights = "examples") -> Method:
    """weights: by examples, as in the paper, or uniform."""
    return Method(Correction(), weights, normaliser="fednova")
