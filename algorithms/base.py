"""What an algorithm is: a frozen set of plain functions over named tensors.

An algorithm has two halves. The client half is one local rule,

    d = a * g + u + mu * (y - x),        y <- y - eta_l(t) * d

with `u` constant for a (client, round). The server half says which weighted sums of the clients' deltas it wants, and
makes the next state from them. `delta` is NEW minus OLD everywhere: the client's final model minus the model it was
sent.

The notation is that of the papers: x server model, y client model, g client gradient, eta_l / eta_g local / server
learning rate, K_i local steps of client i, p_i aggregation weights that sum to one over the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

Tensors = dict[str, torch.Tensor]
"""Named tensors in a fixed order; no function of this package changes one that it was given."""

Weights = Literal["uniform", "examples"]


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """The facts about one client's update that weights and normalisers look at."""

    client_id: str
    num_examples: int
    """n_i, examples trained on; over 0."""
    num_steps: int
    """K_i, mini-batch steps made; over 0."""

    def __post_init__(self) -> None:
        if self.num_examples <= 0 or self.num_steps <= 0:
            raise ValueError(f"expected an update of at least one example and one step, got {self}")


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """Where in the run a server step stands."""

    round: int
    """t, counted from 0."""
    learning_rate: float
    """eta_l(t), the local rate that produced the deltas of this round; over 0."""

    def __post_init__(self) -> None:
        if self.round < 0 or not self.learning_rate > 0.0:
            raise ValueError(f"expected a round counted from 0 and a learning rate over 0, got {self}")


@dataclass(frozen=True, slots=True)
class LocalRule:
    """The client half: d = a * g + u + mu * (y - x). Neutral values (1, None, 0) are skipped, not computed."""

    a: float = 1.0
    u: Tensors | None = None
    mu: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """A sum over the cohort that a server step wants: sum_i coefficients[i] * payload_i, in float64, rounded once."""

    coefficients: tuple[float, ...]
    """One for each update, in the order of the updates that were asked about."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """All that passes from round to round: a checkpoint is this, saved."""

    x: Tensors
    """Trainable parameters of the server model."""
    memory: Mapping[str, Tensors] = field(default_factory=dict)
    """Model-sized state by the paper's symbol, such as FedCM's "Delta"; same names, shapes and dtypes as x."""

    def replace(self, **changes: object) -> ServerState:
        """A new state with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One method, both halves, ready to run. Built by `algorithms.build(name, **parameters)`."""

    name: str
    parameters: Mapping[str, float | int | str | bool]
    """Every parameter with its value, defaults filled in: what is sent to clients and kept with results."""
    init: Callable[[Tensors], ServerState]
    """Trainable parameters of the first model -> state before round 0."""
    direction: Callable[[ServerState], Tensors | None]
    """State -> the second bundle sent down beside the model, or None where the method has none."""
    local_rule: Callable[[Tensors | None], LocalRule]
    """Direction as received (None if there is none) -> the rule of every local step of the round."""
    weights: Callable[[Sequence[UpdateInfo]], tuple[float, ...]]
    """p_i of the cohort's updates; they sum to one. Buffers are averaged with them too."""
    sums: Callable[[Sequence[UpdateInfo], RoundInfo], Mapping[str, WeightedSum]]
    """The sums over deltas that `server_step` wants, by name."""
    server_step: Callable[[ServerState, Mapping[str, Tensors], RoundInfo], ServerState]
    """State and the sums asked for -> next state."""
