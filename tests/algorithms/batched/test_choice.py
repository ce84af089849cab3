"""The estimate of a client's memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import algorithms as fl
from algorithms.batched.choice import bytes_of_client


def test_it_grows_with_parameters_and_activations() -> None:
    """Eight times the parameters, and twice what the forward pass keeps for the backward pass."""
    model, data = nn.Linear(4, 3), fl.LocalData([], [], functional.mse_loss)
    few, many = (bytes_of_client(model, data, (torch.zeros(rows, 4), torch.zeros(rows, 3))) for rows in (10, 1010))
    # Kept for each row: 4 inputs, 3 outputs and 3 targets of the loss.
    assert many - few == 2 * 1000 * (4 + 3 + 3) * 4
    assert few - 8 * 15 * 4 == 2 * 10 * (4 + 3 + 3) * 4
