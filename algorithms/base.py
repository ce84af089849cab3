"""The types of an algorithm: an immutable set of functions over named tensors.

An algorithm has two halves. The client half is one local rule,

    d = a * g + u + mu * (y - x),        y <- y - eta_l(t) * d

with `u` constant for one client and round. The server half defines the payloads that clients send, the weighted sums of
them, and the next state as a function of these sums. `delta` is NEW minus OLD everywhere: the client's final model
minus the model it received.

A round has one or more exchanges. In each, the server sends the model and possibly a direction (a second set of
tensors), and clients send payloads. The direction of an exchange may depend on the sums of earlier exchanges.

The notation is that of the papers: x server model, y client model, g client gradient, eta_l / eta_g local / server
learning rate, K_i local steps of client i, p_i aggregation weights that sum to one over the cohort S, N population.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from algorithms.optimizers.spec import RateSchedule
from algorithms.optimizers.steps import LocalOptimizer
from algorithms.precision import rounded, widened

Tensors = dict[str, torch.Tensor]
"""Named tensors in a fixed order. Functions of this package do not change their arguments, unless they say so."""

Memory = Mapping[str, Tensors]
"""Model-sized tensors kept from round to round, by the paper's symbol."""

Weights = Literal["uniform", "examples"]

Objective = Literal["uniform", "examples"]
"""The minimised objective: the mean of f_i over the clients of the population, or over their examples."""

Payload = str
"""The name of what a client sends, with the layout of the trainable parameters. BASIC_PAYLOADS, or a name of a method's
own, with a ComputedPayload."""

BASIC_PAYLOADS = ("delta", "full_gradient", "client_momentum")
"""delta: y_final - x; full_gradient: g_i(x) over the whole local set; client_momentum: the local momentum buffer at the
end."""

PAYLOAD_NAME = re.compile(r"(?!buffers$)[A-Za-z0-9_.-]{1,64}")
"""What the wire accepts as the name of a payload. "buffers" names the buffers of the model in limits of norms."""

Order = Literal["paper", "feddyn_code"]
"""paper: gradient, clip, decay, mix. feddyn_code: gradient, mix, clip the mixture, then decay, as FedDyn's program."""


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """Metadata of one client's update, from which weights and normalisers are computed."""

    client_id: str
    num_examples: int
    """n_i, the examples trained on; greater than 0."""
    num_steps: int
    """K_i, the mini-batch steps; greater than 0."""
    clip_factor: float = 1.0
    """The admitted delta is this factor times the delta as sent; greater than 0, at most 1."""

    def __post_init__(self) -> None:
        if self.num_examples <= 0 or self.num_steps <= 0:
            raise ValueError(f"expected an update of at least one example and one step, got {self}")
        if not 0.0 < self.clip_factor <= 1.0:
            raise ValueError(f"expected a clip factor over 0 and at most 1, got {self}")


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """Facts about a round that a server step depends on. Those that the method does not use may be omitted."""

    round: int
    """t, counted from 0."""
    learning_rate: float
    """eta_l(t), the local learning rate that produced the deltas of this round; greater than 0."""
    previous_learning_rate: float | None = None
    """eta_l(t - 1); None in round 0, or if it is the same. Needed for momentum_units = gradient."""
    rounds: int | None = None
    """T, the planned rounds of the run; it must not change during the run. Needed for Demon."""
    population: int | None = None
    """N, the clients that the run may sample, fixed for the run. Needed for SCAFFOLD and FedDyn."""
    population_examples: int | None = None
    """sum n_i over the population. Needed for objective = examples."""
    cohort_size: int | None = None
    """|S|, the updates that were summed. Needed for SCAFFOLD."""
    schedule: RateSchedule = field(default_factory=RateSchedule)
    """Factor of eta_l(t) over the steps of the round, as in LocalSettings."""

    def __post_init__(self) -> None:
        if self.round < 0 or not self.learning_rate > 0.0:
            raise ValueError(f"expected a round counted from 0 and a learning rate over 0, got {self}")

    def sum_of_rates(self, steps: int) -> float:
        """sum_k eta_k, the sum of the rates of a client's K_i steps; eta_l(t) K_i without a schedule."""
        if self.schedule.constant:
            return self.learning_rate * steps
        return self.learning_rate * sum(self.schedule.factor(step, steps) for step in range(steps))

    def need(self, fact: Literal["rounds", "population", "population_examples", "cohort_size"]) -> int:
        """A fact that the method needs. Raises ValueError if it was omitted, and for a cohort larger than N."""
        value: int | None = getattr(self, fact)
        if not value or value < 0:
            raise ValueError(f"this method needs {fact}, over 0, in every round's RoundInfo; got {self}")
        if self.population and self.cohort_size and self.cohort_size > self.population:
            raise ValueError(
                f"expected a cohort of at most the population's {self.population} clients, got {self.cohort_size}; "
                "population is N, all clients that the run may sample"
            )
        return value


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Settings of the local steps of one round, for every method."""

    learning_rate: float
    """eta_l(t), greater than 0, with the decay by round applied."""
    weight_decay: float = 0.0
    """wd: wd * y is added to the gradient g before the method's rule. 0 for none."""
    max_gradient_norm: float = 0.0
    """C: the data gradient is clipped to this global L2 norm, before weight decay. 0 for no clipping."""
    schedule: RateSchedule = field(default_factory=RateSchedule)
    """The schedule of the learning rate over the steps."""
    micro_batch_size: int = 0
    """A batch goes through the model in parts of at most so many examples. 0: whole batches."""
    scaled_loss: bool = False
    """The loss is scaled, for a forward pass in float16 (algorithms.precision)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"expected a learning rate over 0, got {self.learning_rate}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"expected a weight decay of 0 or more, got {self.weight_decay}")
        if not 0.0 <= self.max_gradient_norm < math.inf:
            raise ValueError(f"expected a gradient norm of 0 (no clipping) or more, got {self.max_gradient_norm}")
        if self.micro_batch_size < 0:
            raise ValueError(f"expected a micro_batch_size of 0 (whole batches) or more, got {self.micro_batch_size}")

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.max_gradient_norm > 0.0

    def clip_factor(self, norm: torch.Tensor) -> torch.Tensor:
        """min(1, C / (||g|| + 1e-6)) for each of the norms, on their device: a clipped gradient is factor * g."""
        return (self.max_gradient_norm / (norm + 1e-6)).clamp(max=1.0)


Scope = Literal["model", "tensor"]
"""The scope of SAM's norm: all trainable parameters together, or each tensor separately."""


@dataclass(frozen=True, slots=True)
class GradientRule:
    """How a local gradient g is computed."""

    rho: float = 0.0
    """Radius of SAM: g at y + e, same batch, with e of that norm in the direction of g(y). 0: at y."""
    order: Order = "paper"
    scope: Scope = "model"
    """The scope of SAM's norm."""
    p: float = 2.0
    """The order of SAM's norm: a finite number over 1."""


@dataclass(frozen=True, slots=True)
class InputAscent:
    """A map applied to the inputs. Its parameters ascend the loss while the model descends it."""

    parameters: Tensors
    """Their initial values; if empty, those of `start`."""
    start: Callable[[torch.Tensor], Tensors]
    """First inputs -> parameters of the identity map."""
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
    """Initial local momentum: v <- gamma * v + d, y <- y - eta_l * v. None: y <- y - eta_l * d."""
    gamma: float = 0.0
    ascent: InputAscent | None = None
    optimizer: LocalOptimizer | None = None
    """It makes the steps, with d in place of the gradient. None: y <- y - eta_l * d. Not with v."""


@dataclass(frozen=True, slots=True)
class ClientContext:
    """A client's inputs to an exchange besides the model and its data."""

    direction: Tensors | None = None
    """The tensors that the server sent in addition to the model."""
    state: Memory = field(default_factory=dict)
    """The client's state after its last round that counted, or `client_init`."""
    omega: float = 1.0
    """omega_i = N n_i / sum n if the method's objective is weighted by examples."""
    optimizer: Memory = field(default_factory=dict)
    """The averaged state of the local optimizer that the server sent. Empty: none, so that it starts anew."""


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """The result of one client's exchange; tensors are on the model's device."""

    payloads: Mapping[Payload, Tensors]
    """The payloads of the exchange, in its order."""
    buffers: Tensors
    """Final values of the model's buffers; empty without training."""
    steps: int
    """K_i, or the batches of a full gradient."""
    learning_rate: float
    """eta_l(t) of the steps."""
    loss: float | None = None
    """Mean loss over the local steps, each before its step; None without training."""
    ascent: Tensors = field(default_factory=dict)
    """Parameters of an InputAscent after the last step. The client keeps them and never sends them."""
    optimizer: Memory = field(default_factory=dict)
    """State of the local optimizer after the last step; empty if it starts anew in each round."""
    personal: Tensors = field(default_factory=dict)
    """Final values of the personal parameters and buffers. The client keeps them and never sends them."""
    examples: int | None = None
    """n_i, if a training loop of the task's own reported it; None: all local examples."""
    epochs: tuple[Mapping[str, float], ...] = ()
    """Means that were measured in each local epoch, by name; empty if none were."""

    def admitted(self, clip_factor: float) -> ClientUpdate:
        """The update as the server admitted it: its delta times `clip_factor`."""
        if clip_factor == 1.0 or "delta" not in self.payloads:
            return self
        delta = {name: clip_factor * tensor for name, tensor in widened(self.payloads["delta"]).items()}
        return replace(self, payloads={**self.payloads, "delta": delta})


@dataclass(frozen=True, slots=True)
class ComputedPayload:
    """A payload that clients compute from basic ones, such as SCAFFOLD's g_i(x) - c_i."""

    made_of: tuple[Payload, ...]
    """The basic payloads that it needs; they are computed, but not sent."""
    compute: Callable[[ClientContext, ClientUpdate], Tensors]
    """(context, an update with these basic payloads) -> the payload."""
    wide: bool = False
    """Sent in float32 for parameters of a lower precision. False: in the model's dtypes."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """A sum over the cohort for a server step: sum_i coefficients[i] * payload_i, in float64, rounded once."""

    coefficients: tuple[float, ...]
    """One for each update, in the order of the cohort passed to `Exchange.sums`."""
    payload: Payload = "delta"


@dataclass(frozen=True, slots=True)
class ServerState:
    """All state that passes from round to round. A checkpoint contains exactly this."""

    x: Tensors
    """Trainable parameters of the server model; float32 for a model of a lower precision (algorithms.precision)."""
    memory: Memory = field(default_factory=dict)
    """Model-sized state by the paper's symbol, such as FedCM's "Delta"; same names, shapes and dtypes as x."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The model's dtypes of the parameters that have a lower precision than x."""

    def replace(self, **changes: object) -> ServerState:
        """A new state with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]  # fields are checked by their names only

    def as_sent(self, tensors: Tensors) -> Tensors:
        """Tensors of x's layout in the model's dtypes, as clients receive them; the argument itself if none differs."""
        return rounded(tensors, self.dtypes)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One assignment and the payloads for it. The next exchange goes to the clients whose payloads were accepted."""

    payloads: tuple[Payload, ...]
    """The payloads that clients send, in this order."""
    direction: Callable[[ServerState, Mapping[str, Tensors]], Tensors | None]
    """(state, sums of earlier exchanges) -> the direction sent with x, in the model's dtypes, or None."""
    sums: Callable[[Sequence[UpdateInfo], RoundInfo], Mapping[str, WeightedSum]]
    """(cohort, round) -> the weighted sums of payloads, by a name that is unique in the round."""
    computed: Mapping[Payload, ComputedPayload] = field(default_factory=dict)
    """The rules of the payloads that are not basic."""

    @property
    def basic(self) -> frozenset[Payload]:
        """The basic payloads that a client computes, to send them or to compute others from them."""
        rules = [self.computed.get(payload) for payload in self.payloads]
        made_of = (payload for rule in rules if rule is not None for payload in rule.made_of)
        return frozenset({*made_of, *(payload for payload in self.payloads if payload not in self.computed)})

    @property
    def trains(self) -> bool:
        """Whether clients train; their models' buffers change then."""
        return not self.basic.isdisjoint({"delta", "client_momentum"})

    @property
    def passes(self) -> bool:
        """Whether clients first compute a gradient over their whole local set."""
        return "full_gradient" in self.basic


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A method with both halves. Built by `algorithms.build(name, **parameters)`."""

    name: str
    parameters: Mapping[str, float | int | str | bool]
    """All parameters with their values, defaults included. They are sent to clients and stored with results."""
    init: Callable[[Tensors], ServerState]
    """Trainable parameters of the initial model -> state before round 0."""
    exchanges: tuple[Exchange, ...]
    """The exchanges of a round in order; the last one trains."""
    weights: Callable[[Sequence[UpdateInfo]], tuple[float, ...]]
    """Cohort -> p_i, which sum to one. Buffers are averaged with them too."""
    server_step: Callable[[ServerState, Mapping[str, Tensors], RoundInfo], ServerState]
    """(state, sums of all exchanges, round) -> next state."""
    gradient: GradientRule
    """How clients compute g, in local steps and for a full gradient."""
    client_rule: Callable[[ClientContext], LocalRule]
    """A client's context -> the rule of all local steps of the round."""
    client_init: Callable[[Tensors], Memory]
    """x -> a client's state before its first round, in the server's precision; empty without client state."""
    next_client_state: Callable[[ClientContext, ClientUpdate], Memory]
    """(context, the update as ADMITTED) -> the client's next state. Only for a round that counted."""
    restart: Callable[[ServerState], ServerState]
    """Reset the server memory that mirrors the clients' states, when all of these are reset. x stays."""
    keeps_client_state: bool = False
    plain_steps: bool = False
    """Its local steps are plain SGD on g, so that its formulas hold for a training loop of a task's own too."""
    no_loop: str = ""
    """Why a training loop of a task's own cannot make its local steps, not even inexactly; empty: it can."""
    objective: Objective = "uniform"
    """examples: each client's context needs its omega_i."""
    needs_population: bool = False
    """Every RoundInfo needs N, and N must not change. Reducers other than the mean break such a method."""
    needs_sgd: str = ""
    """Why its formulas hold only for local steps of plain SGD; empty: they hold for any."""
    needs_one_rate: bool = True
    """Whether those formulas need the same learning rate in all steps of a round, too."""
    own_steps: str = ""
    """Why its local steps cannot be those of another optimizer, not even inexactly; empty: they can."""
    skipping: float = 0.0
    """p: a round has K_t ~ Geometric(p) local steps, as many for each client, and all clients. 0: K_i is a setting."""
    decay_factor: float = 1.0
    """Effective weight decay / wd: where d is stationary, it is g + decay_factor * wd * y, up to a factor."""
    averaged: tuple[str, ...] = ()
    """Symbols of the server's memory that are the averaged state of the local optimizer."""

    def loop_conflict(self, *, inexact: bool) -> str:
        """Why a training loop of a task's own cannot make the local steps; empty if it can.

        inexact: its formulas may be wrong then.
        """
        if self.no_loop or inexact or self.plain_steps:
            return self.no_loop
        return "its local steps are not plain steps along the gradient, and the task's loop makes its own"

    def direction(self, state: ServerState) -> Tensors | None:
        """The direction of the first exchange. Most methods have only one."""
        return self.exchanges[0].direction(state, {})

    def local_rule(self, direction: Tensors | None) -> LocalRule:
        """The local rule of a client without state."""
        return self.client_rule(ClientContext(direction))

    def sums(self, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Mapping[str, WeightedSum]:
        """The sums of the last exchange. Most methods have only one."""
        return self.exchanges[-1].sums(cohort, round_info)
