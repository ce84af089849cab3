"""What an algorithm is: a frozen set of plain functions over named tensors.

An algorithm has two halves. The client half is one local rule,

    d = a * g + u + mu * (y - x),        y <- y - eta_l(t) * d

with `u` constant for a (client, round). The server half says which payloads it wants from the clients and which
weighted sums of them, and makes the next state from those sums. `delta` is NEW minus OLD everywhere: the client's final
model minus the model it was sent.

A round is one exchange or several: in each, something is sent down beside the model and payloads come up. What goes
down in an exchange may be made of the sums of those before it.

The notation is that of the papers: x server model, y client model, g client gradient, eta_l / eta_g local / server
learning rate, K_i local steps of client i, p_i aggregation weights that sum to one over the cohort S, N population.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

Tensors = dict[str, torch.Tensor]
"""Named tensors in a fixed order; no function of this package changes one that it was given."""

Memory = Mapping[str, Tensors]
"""Model-sized tensors that are kept from round to round, by the paper's symbol."""

Weights = Literal["uniform", "examples"]

Objective = Literal["uniform", "examples"]
"""What is minimised: the mean of f_i over the clients of the population, or over their examples."""

Payload = Literal["delta", "full_gradient", "variate_change", "client_momentum"]
"""What a client can send up, each laid out as the trainable parameters:
delta: y_final - x; full_gradient: g_i(x) over the whole local set; variate_change: g_i(x) - c_i; client_momentum: the
local heavy-ball buffer at the end."""

Order = Literal["paper", "feddyn_code"]
"""paper: gradient, clip, decay, mix. feddyn_code: gradient, mix, clip the mixture, then decay, as FedDyn's program."""


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """The facts about one client's update that weights and normalisers look at."""

    client_id: str
    num_examples: int
    """n_i, examples trained on; over 0."""
    num_steps: int
    """K_i, mini-batch steps made; over 0."""
    clip_factor: float = 1.0
    """The delta as admitted is this times the delta as sent; over 0, at most 1."""

    def __post_init__(self) -> None:
        if self.num_examples <= 0 or self.num_steps <= 0:
            raise ValueError(f"expected an update of at least one example and one step, got {self}")
        if not 0.0 < self.clip_factor <= 1.0:
            raise ValueError(f"expected a clip factor over 0 and at most 1, got {self}")


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """Where in the run a server step stands. What no part of a method asks for may be left out."""

    round: int
    """t, counted from 0."""
    learning_rate: float
    """eta_l(t), the local rate that produced the deltas of this round; over 0."""
    previous_learning_rate: float | None = None
    """eta_l(t - 1); None in round 0, or where it is the same. momentum_units = gradient asks for it."""
    rounds: int | None = None
    """T, the rounds that the run was planned for; it must not change in mid-run. Demon asks for it."""
    population: int | None = None
    """N, the clients the run may draw from, fixed for the run. SCAFFOLD and FedDyn ask for it."""
    population_examples: int | None = None
    """sum n_i over the population. objective = examples asks for it."""
    cohort_size: int | None = None
    """|S|, the updates that were summed. SCAFFOLD asks for it."""

    def __post_init__(self) -> None:
        if self.round < 0 or not self.learning_rate > 0.0:
            raise ValueError(f"expected a round counted from 0 and a learning rate over 0, got {self}")

    def need(self, fact: Literal["rounds", "population", "population_examples", "cohort_size"]) -> int:
        """A fact that the method cannot do without. Raises ValueError if it was left out."""
        value: int | None = getattr(self, fact)
        if not value or value < 0:
            raise ValueError(f"this method needs {fact}, over 0, in every round's RoundInfo; got {self}")
        return value


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How the steps of one round are made, whatever the method."""

    learning_rate: float
    """eta_l(t), over 0; the decay by round is already in it."""
    weight_decay: float = 0.0
    """wd: wd * y becomes part of the gradient g before the method's rule. 0: none."""
    max_gradient_norm: float = 0.0
    """C: global L2 norm that the data gradient is clipped to, before the decay. 0: no clipping."""

    def __post_init__(self) -> None:
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"expected a learning rate over 0, got {self.learning_rate}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"expected a weight decay of 0 or more, got {self.weight_decay}")
        if not 0.0 <= self.max_gradient_norm < math.inf:
            raise ValueError(f"expected a gradient norm of 0 (no clipping) or more, got {self.max_gradient_norm}")


Scope = Literal["model", "tensor"]
"""What SAM's norm is taken over: all trainable parameters together, or each tensor by itself."""


@dataclass(frozen=True, slots=True)
class GradientRule:
    """How g is taken."""

    rho: float = 0.0
    """Radius of SAM: g at y + rho * g(y) / ||g(y)||, same batch. 0: at y."""
    order: Order = "paper"
    scope: Scope = "model"
    """Of SAM's norm."""


@dataclass(frozen=True, slots=True)
class InputAscent:
    """Inputs seen through a map whose own parameters climb the loss while the model goes down it."""

    parameters: Tensors
    """Where they start; empty: at `start`."""
    start: Callable[[torch.Tensor], Tensors]
    """First inputs -> parameters that change nothing."""
    apply: Callable[[torch.Tensor, Tensors], torch.Tensor]
    """(inputs, parameters) -> inputs of the model."""
    ascend: Callable[[Tensors, Tensors], Tensors]
    """(parameters, gradient of the batch's loss) -> next parameters."""


@dataclass(frozen=True, slots=True)
class LocalRule:
    """The client half: d = a * g + u + mu * (y - x). Neutral values are skipped, not computed."""

    a: float = 1.0
    u: Tensors | None = None
    mu: float = 0.0
    gradient: GradientRule = field(default_factory=GradientRule)
    anchored: bool = False
    """g is g(y; batch) - g(x; batch), one batch for both."""
    v: Tensors | None = None
    """Start of a local heavy ball v <- gamma * v + d, y <- y - eta_l * v. None: y <- y - eta_l * d."""
    gamma: float = 0.0
    ascent: InputAscent | None = None


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What a client has when an exchange begins, besides the model and its data."""

    direction: Tensors | None = None
    """What was sent beside the model."""
    state: Memory = field(default_factory=dict)
    """What the client kept of its last round that counted, or `client_init`."""
    omega: float = 1.0
    """omega_i = N n_i / sum n, where the method's objective is weighted by examples."""


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """One client's answer in one exchange; tensors are on the model's device."""

    payloads: Mapping[Payload, Tensors]
    """As the exchange wanted them, in its order."""
    buffers: Tensors
    """Final values of the model's buffers; none from an exchange without training."""
    steps: int
    """K_i, or the batches of a full gradient."""
    learning_rate: float
    """eta_l(t) that the steps were made with."""
    loss: float | None = None
    """Mean loss over the local steps, each before its step; None without training."""
    ascent: Tensors = field(default_factory=dict)
    """Parameters of an InputAscent after the last step; they are kept and never sent."""

    def admitted(self, clip_factor: float) -> ClientUpdate:
        """The update as the server counted it: its delta scaled."""
        if clip_factor == 1.0 or "delta" not in self.payloads:
            return self
        delta = {name: clip_factor * tensor for name, tensor in self.payloads["delta"].items()}
        return replace(self, payloads={**self.payloads, "delta": delta})


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """A sum over the cohort that a server step wants: sum_i coefficients[i] * payload_i, in float64, rounded once."""

    coefficients: tuple[float, ...]
    """One for each update, in the order of the updates that were asked about."""
    payload: Payload = "delta"


@dataclass(frozen=True, slots=True)
class ServerState:
    """All that passes from round to round: a checkpoint is this, saved."""

    x: Tensors
    """Trainable parameters of the server model."""
    memory: Memory = field(default_factory=dict)
    """Model-sized state by the paper's symbol, such as FedCM's "Delta"; same names, shapes and dtypes as x."""

    def replace(self, **changes: object) -> ServerState:
        """A new state with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One assignment and its answers. A cohort's second exchange goes to those whose first answer was accepted."""

    payloads: tuple[Payload, ...]
    """What comes up, in this order."""
    direction: Callable[[ServerState, Mapping[str, Tensors]], Tensors | None]
    """(state, sums of the exchanges before) -> the second bundle sent down beside x, or None."""
    sums: Callable[[Sequence[UpdateInfo], RoundInfo], Mapping[str, WeightedSum]]
    """The sums over payloads that the server wants, by name; no two exchanges use one name."""

    @property
    def trains(self) -> bool:
        """Whether clients make local steps, so that their models' buffers change too."""
        return "delta" in self.payloads

    @property
    def passes(self) -> bool:
        """Whether clients take a gradient over their whole local set first."""
        return not {"full_gradient", "variate_change"}.isdisjoint(self.payloads)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One method, both halves, ready to run. Built by `algorithms.build(name, **parameters)`."""

    name: str
    parameters: Mapping[str, float | int | str | bool]
    """Every parameter with its value, defaults filled in: what is sent to clients and kept with results."""
    init: Callable[[Tensors], ServerState]
    """Trainable parameters of the first model -> state before round 0."""
    exchanges: tuple[Exchange, ...]
    """In order; the last one trains."""
    weights: Callable[[Sequence[UpdateInfo]], tuple[float, ...]]
    """p_i of the cohort's updates; they sum to one. Buffers are averaged with them too."""
    server_step: Callable[[ServerState, Mapping[str, Tensors], RoundInfo], ServerState]
    """State and the sums of all exchanges -> next state."""
    gradient: GradientRule
    """How clients take g, in local steps and for a full gradient."""
    client_rule: Callable[[ClientContext], LocalRule]
    """What a client has -> the rule of every local step of the round."""
    client_init: Callable[[Tensors], Memory]
    """x -> what a client keeps before its first round; empty: this method's clients keep nothing."""
    next_client_state: Callable[[ClientContext, ClientUpdate], Memory]
    """(what the client had, its update as ADMITTED) -> what it keeps. Only of a round that counted."""
    restart: Callable[[ServerState], ServerState]
    """What the server keeps as the sum of what clients keep starts anew, as every client's state does; x stays."""
    keeps_client_state: bool = False
    objective: Objective = "uniform"
    """examples: clients must be told their omega_i."""
    needs_population: bool = False
    """Every RoundInfo must have N, and N must not change; a reducer that is not a mean breaks this method."""

    def direction(self, state: ServerState) -> Tensors | None:
        """What is sent beside x in the first exchange, the only one of most methods."""
        return self.exchanges[0].direction(state, {})

    def local_rule(self, direction: Tensors | None) -> LocalRule:
        """The rule of a client that keeps no state."""
        return self.client_rule(ClientContext(direction))

    def sums(self, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Mapping[str, WeightedSum]:
        """The sums of the last exchange, the only one of most methods."""
        return self.exchanges[-1].sums(cohort, round_info)
