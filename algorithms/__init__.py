"""The mathematics of federated learning with momentum, as plain functions that need torch and no server.

Update rules, aggregation and local training may enter. Network, files, clocks and threads may not, and the package
imports no other package of the project. The modules here are the core; methods/ has one module for each paper.

A round of FedCM with one client:

>>> import torch
>>> from torch.nn import functional as F
>>> import algorithms as fl

>>> fedcm = fl.build("fedcm", alpha=0.1)
>>> model = torch.nn.Linear(1, 1, bias=False)
>>> _ = torch.nn.init.zeros_(model.weight)
>>> state = fedcm.init(fl.read_state(model).trainable)

The client fits weight * 1 = 3 in two steps. Each gradient is 2 * (weight - 3), multiplied by alpha:

>>> batches = [(torch.tensor([[1.0]]), torch.tensor([[3.0]]))] * 2
>>> rule = fedcm.local_rule(fedcm.direction(state))
>>> result = fl.train_locally(model, batches, F.mse_loss, rule, fl.LocalSettings(learning_rate=0.5))
>>> round(result.delta["weight"].item(), 4), result.steps
(0.57, 2)

The server adds the mean delta. The momentum of the next round is that delta divided by -(steps * learning rate):

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
    BASIC_PAYLOADS,
    Algorithm,
    ClientContext,
    ClientUpdate,
    ComputedPayload,
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
from algorithms.batches import Batch, Forward, examples_of, forward_pair, to_device
from algorithms.buffered import Buffered, Version, apply_buffer
from algorithms.client import LocalData, LoopReport, Work, answer
from algorithms.compose import (
    ClientState,
    Components,
    Correction,
    Method,
    PreparatoryExchange,
    ServerOptimizer,
    compose,
    mean_delta,
    mean_delta_and_gradient,
)
from algorithms.local import LocalOptions, LocalResult, train_locally
from algorithms.model_state import ModelState, load_state, read_state
from algorithms.parameters import (
    PER_ROUND,
    AlgorithmError,
    Decay,
    DecayPerRound,
    NonNegative,
    NonNegativePerRound,
    Positive,
    PositivePerRound,
    Range,
    Share,
    SharePerRound,
)
from algorithms.reducers import BUILT_IN as BUILT_IN_REDUCERS
from algorithms.reducers import Geometry, Reducer, add_reducer, build_reducer, reducer_parameters
from algorithms.registry import add_method, build, is_known, names, parameters_of
from algorithms.rounds import Participant, RoundResult, RunState, run_round, start_run
from algorithms.schedules import Schedule, Schedules, at_round, check_schedules, values_in
from algorithms.staleness import BUILT_IN as BUILT_IN_STALENESS
from algorithms.staleness import Staleness, add_staleness, build_staleness

__all__ = [
    "BASIC_PAYLOADS",
    "BUILT_IN_REDUCERS",
    "BUILT_IN_STALENESS",
    "PER_ROUND",
    "Algorithm",
    "AlgorithmError",
    "Batch",
    "Buffered",
    "ClientContext",
    "ClientState",
    "ClientUpdate",
    "Components",
    "ComputedPayload",
    "Correction",
    "Decay",
    "DecayPerRound",
    "Exchange",
    "Forward",
    "Geometry",
    "GradientRule",
    "InputAscent",
    "LocalData",
    "LocalOptions",
    "LocalResult",
    "LocalRule",
    "LocalSettings",
    "LoopReport",
    "Memory",
    "Method",
    "ModelState",
    "NonNegative",
    "NonNegativePerRound",
    "Objective",
    "Order",
    "Participant",
    "Payload",
    "Positive",
    "PositivePerRound",
    "PreparatoryExchange",
    "Range",
    "Reducer",
    "RoundInfo",
    "RoundResult",
    "RunState",
    "Schedule",
    "Schedules",
    "Scope",
    "ServerOptimizer",
    "ServerState",
    "Share",
    "SharePerRound",
    "Staleness",
    "Tensors",
    "Update",
    "UpdateInfo",
    "Version",
    "WeightedSum",
    "Weights",
    "Work",
    "add_method",
    "add_reducer",
    "add_staleness",
    "answer",
    "apply_buffer",
    "apply_updates",
    "at_round",
    "average_buffers",
    "build",
    "build_reducer",
    "build_staleness",
    "check_schedules",
    "compose",
    "example_weights",
    "examples_of",
    "forward_pair",
    "is_known",
    "load_state",
    "maximum",
    "mean_delta",
    "mean_delta_and_gradient",
    "names",
    "omega",
    "parameters_of",
    "read_state",
    "reducer_parameters",
    "run_round",
    "start_run",
    "sum_exchange",
    "to_device",
    "train_locally",
    "uniform_weights",
    "values_in",
    "weighted_sums",
    "weighted_sums_of_tensors",
]
