"""The mathematics of federated learning with momentum: torch only, no server needed.

A round of FedCM with one client:

>>> import torch
>>> from torch.nn import functional as F
>>> import algorithms as fl

>>> fedcm = fl.build("fedcm", alpha=0.1)
>>> model = torch.nn.Linear(1, 1, bias=False)
>>> _ = torch.nn.init.zeros_(model.weight)
>>> state = fedcm.init(fl.read_state(model).trainable)

The client fits weight * 1 = 3 in two steps; each gradient is 2 * (weight - 3) and counts by alpha:

>>> batches = [(torch.tensor([[1.0]]), torch.tensor([[3.0]]))] * 2
>>> rule = fedcm.local_rule(fedcm.direction(state))
>>> result = fl.train_locally(model, batches, F.mse_loss, rule, fl.LocalSettings(learning_rate=0.5))
>>> round(result.delta["weight"].item(), 4), result.steps
(0.57, 2)

The server moves by the mean delta and remembers it, per step and unit of learning rate, as the next round's momentum:

>>> info = fl.UpdateInfo("client-1", num_examples=1, num_steps=result.steps)
>>> state = fl.apply_updates(fedcm, state, [(info, result.delta)], fl.RoundInfo(round=0, learning_rate=0.5))
>>> round(state.x["weight"].item(), 4), round(state.memory["Delta"]["weight"].item(), 4)
(0.57, -0.57)
"""

from algorithms.aggregate import (
    Update,
    apply_updates,
    average_buffers,
    example_weights,
    maximum,
    omega,
    sum_exchange,
    uniform_weights,
    weighted_sums,
    weighted_sums_of_tensors,
)
from algorithms.base import (
    Algorithm,
    ClientContext,
    ClientUpdate,
    Exchange,
    GradientRule,
    InputAscent,
    LocalRule,
    LocalSettings,
    Memory,
    Objective,
    Order,
    Payload,
    RoundInfo,
    Scope,
    ServerState,
    Tensors,
    UpdateInfo,
    WeightedSum,
    Weights,
)
from algorithms.client import LocalData, Work, answer
from algorithms.fedbuff import buffered_step, staleness_weights
from algorithms.local import LocalResult, train_locally
from algorithms.model_state import ModelState, load_state, read_state
from algorithms.parameters import AlgorithmError
from algorithms.registry import build, names

__all__ = [
    "Algorithm",
    "AlgorithmError",
    "ClientContext",
    "ClientUpdate",
    "Exchange",
    "GradientRule",
    "InputAscent",
    "LocalData",
    "LocalResult",
    "LocalRule",
    "LocalSettings",
    "Memory",
    "ModelState",
    "Objective",
    "Order",
    "Payload",
    "RoundInfo",
    "Scope",
    "ServerState",
    "Tensors",
    "Update",
    "UpdateInfo",
    "WeightedSum",
    "Weights",
    "Work",
    "answer",
    "apply_updates",
    "average_buffers",
    "buffered_step",
    "build",
    "example_weights",
    "load_state",
    "maximum",
    "names",
    "omega",
    "read_state",
    "staleness_weights",
    "sum_exchange",
    "train_locally",
    "uniform_weights",
    "weighted_sums",
    "weighted_sums_of_tensors",
]
