"""A method from its parts: a correction, a server optimizer, weights, and how gradients are taken.

    clients     d = a * g + u + mu * (y - x)                          correction.local_rule
    server      movement, next memory <- sums over the payloads       correction.advance
                x <- x + (what the optimizer makes of the movement)   optimizer.step

Every correction goes with every server optimizer. What keeps them apart is one rule: a correction learns from sums over
the clients' payloads, never from x_{t+1} - x_t, so that the optimizer's momentum or scaling cannot leak into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from algorithms import tree
from algorithms.aggregate import WEIGHTS
from algorithms.base import (
    Algorithm,
    ClientContext,
    ClientUpdate,
    Exchange,
    GradientRule,
    LocalRule,
    Memory,
    Objective,
    Payload,
    RoundInfo,
    ServerState,
    Tensors,
    UpdateInfo,
    WeightedSum,
    Weights,
)
from algorithms.parameters import AlgorithmError, Value

Sums = Mapping[str, WeightedSum]
Normaliser = Literal["none", "fednova"]

Shares = tuple[float, ...]
"""p_i of the cohort, in its order."""


def mean_delta(p: Shares, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
    """Dbar = sum_i p_i delta_i."""
    del cohort, round_info
    return {"Dbar": WeightedSum(p)}


def mean_delta_and_gradient(p: Shares, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
    """Dbar, and G = - sum_i p_i delta_i / (eta_l K_i) in units of a gradient, each client by its own K_i."""
    eta_l = round_info.learning_rate
    G = tuple(-p_i / (eta_l * client.num_steps) for p_i, client in zip(p, cohort, strict=True))
    return {"Dbar": WeightedSum(p), "G": WeightedSum(G)}


def _plain_rule(client: ClientContext) -> LocalRule:
    """d = g."""
    del client
    return LocalRule()


def _move_by_mean(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
    """The movement is Dbar; no memory changes."""
    del round_info
    return sums["Dbar"], memory


def _steps(client: UpdateInfo, round_info: RoundInfo) -> float:
    """K_i."""
    del round_info
    return float(client.num_steps)


@dataclass(frozen=True, slots=True)
class ClientState:
    """What each client keeps from round to round. As it is: nothing."""

    symbols: tuple[str, ...] = ()
    """Model-sized tensors that start from zero. A client sends none of them."""
    advance: Callable[[ClientContext, ClientUpdate], Memory] = lambda client, update: {}
    """(what the client had, its update as admitted) -> what it keeps."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """A first exchange, before the local steps: payloads at x whose sums make what is sent down for the steps."""

    payloads: tuple[Payload, ...]
    sums: Callable[[Shares, Sequence[UpdateInfo], RoundInfo], Sums]
    direction: Callable[[Memory, Mapping[str, Tensors]], Tensors]
    """(memory, those sums) -> what goes down beside x in the exchange that trains."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How clients correct for drift, and what they and the server keep and send for it. As it is: no correction."""

    local_rule: Callable[[ClientContext], LocalRule] = _plain_rule
    """What a client has -> its rule."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Symbols of what the server keeps, with the value that every entry starts from."""
    sends: str | None = None
    """Symbol of the memory that goes down beside the model."""
    preparation: Preparation | None = None
    """In place of `sends`: a round of two exchanges."""
    payloads: tuple[Payload, ...] = ("delta",)
    """What comes up from local training."""
    sums: Callable[[Shares, Sequence[UpdateInfo], RoundInfo], Sums] = mean_delta
    """(p, cohort, round) -> the sums that `advance` wants. Dbar is among them."""
    advance: Callable[[Memory, Mapping[str, Tensors], RoundInfo], tuple[Tensors, Memory]] = _move_by_mean
    """(memory, all sums of the round, round) -> (the movement that the optimizer is fed with, next memory)."""
    client: ClientState = field(default_factory=ClientState)
    length: Callable[[UpdateInfo, RoundInfo], float] = _steps
    """By how much the rule stretches a constant gradient: what FedNova divides delta_i / eta_l by."""
    objective: Objective = "uniform"
    """examples: its clients are told their omega_i."""
    needs_population: bool = False
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Values of options that it cannot be combined with -> why."""


def _move(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
    """x + movement."""
    del round_info
    return tree.add(x, movement), memory


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """How the server model moves. As it is: by the movement."""

    step: Callable[[Tensors, Memory, Tensors, RoundInfo], tuple[Tensors, Memory]] = _move
    """(x, memory, movement, round) -> (next x, next memory). The movement points forward: it is added."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """As in Correction."""
    units: Mapping[str, int] = field(default_factory=dict)
    """Power of eta_l that each symbol is in: 1 for a mean of deltas, 2 for a mean of squares. Empty: none has any."""


@dataclass(frozen=True, slots=True)
class Method:
    """What one method fixes of the parts, as its builder returns it. None: the run chooses (algorithms.options)."""

    correction: Correction
    weights: Weights
    optimizer: Callable[..., ServerOptimizer] | None = None
    """Builder of the server optimizer; its parameters are the method's too."""
    gradient: Literal["plain", "sam"] | None = None
    normaliser: Normaliser | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of an algorithm; `compose` joins them."""

    correction: Correction
    weights: Weights
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    gradient: GradientRule = field(default_factory=GradientRule)
    normaliser: Normaliser = "none"


def compose(name: str, parameters: Mapping[str, Value], parts: Parts) -> Algorithm:
    """The algorithm that the parts make together.

    Raises:
        AlgorithmError: both parts keep memory under one symbol.
    """
    correction, optimizer = parts.correction, parts.optimizer
    if clash := sorted(correction.memory.keys() & optimizer.memory.keys()):
        raise AlgorithmError(f"{name}: expected parts that keep different memory, got {clash} in both; rename one")

    def init(x: Tensors) -> ServerState:
        if not x:
            raise AlgorithmError(f"{name}: expected a model with trainable parameters, got none; is all of it frozen?")
        starts = {**correction.memory, **optimizer.memory}
        return ServerState(x, {symbol: tree.full_like(x, value) for symbol, value in starts.items()})

    def restart(state: ServerState) -> ServerState:
        if correction.client == ClientState():
            return state
        started = {symbol: tree.full_like(state.x, value) for symbol, value in correction.memory.items()}
        return state.replace(memory={**state.memory, **started})

    return Algorithm(
        name=name,
        parameters=parameters,
        init=init,
        exchanges=_exchanges(parts),
        weights=WEIGHTS[parts.weights],
        server_step=_server_step(correction, optimizer),
        gradient=parts.gradient,
        client_rule=lambda client: replace(correction.local_rule(client), gradient=parts.gradient),
        client_init=lambda x: {symbol: tree.full_like(x, 0.0) for symbol in correction.client.symbols},
        next_client_state=correction.client.advance,
        restart=restart,
        keeps_client_state=correction.client != ClientState(),
        objective=correction.objective,
        needs_population=correction.needs_population,
    )


def _server_step(
    correction: Correction, optimizer: ServerOptimizer
) -> Callable[[ServerState, Mapping[str, Tensors], RoundInfo], ServerState]:
    def server_step(state: ServerState, sums: Mapping[str, Tensors], round_info: RoundInfo) -> ServerState:
        for symbol, total in sums.items():
            tree.check_layout(state.x, total, f"sum {symbol!r}")
        movement, corrected = correction.advance(_part(state, correction.memory), sums, round_info)
        x, optimized = optimizer.step(state.x, _part(state, optimizer.memory), movement, round_info)
        return ServerState(x, {**corrected, **optimized})

    return server_step


def _exchanges(parts: Parts) -> tuple[Exchange, ...]:
    correction, weigh = parts.correction, WEIGHTS[parts.weights]

    def sums(cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
        wanted = dict(correction.sums(weigh(cohort), cohort, round_info))
        if parts.normaliser == "fednova":
            wanted["Dbar"] = _normalised(wanted["Dbar"], [correction.length(c, round_info) for c in cohort])
        return _of_admitted(wanted, cohort)

    def sent(state: ServerState, sums: Mapping[str, Tensors]) -> Tensors | None:
        if preparation is not None:
            return preparation.direction(_part(state, correction.memory), sums)
        return None if correction.sends is None else state.memory[correction.sends]

    preparation = correction.preparation
    training = Exchange(correction.payloads, sent, sums)
    if preparation is None:
        return (training,)
    first = Exchange(
        preparation.payloads, lambda state, sums: None, lambda c, info: preparation.sums(weigh(c), c, info)
    )
    return first, training


def _normalised(Dbar: WeightedSum, lengths: Sequence[float]) -> WeightedSum:
    """FedNova: p_i -> p_i * tau_eff / length_i, tau_eff = sum p_i length_i. Equal lengths change nothing."""
    if len(set(lengths)) == 1:
        return Dbar
    tau_eff = sum(p_i * length for p_i, length in zip(Dbar.coefficients, lengths, strict=True))
    return WeightedSum(tuple(p_i * tau_eff / length for p_i, length in zip(Dbar.coefficients, lengths, strict=True)))


def _of_admitted(wanted: Sums, cohort: Sequence[UpdateInfo]) -> Sums:
    """The sums over deltas as admitted, as sums over deltas as sent."""
    return {
        name: replace(row, coefficients=tuple(c * k.clip_factor for c, k in zip(row.coefficients, cohort, strict=True)))
        if row.payload == "delta"
        else row
        for name, row in wanted.items()
    }


def _part(state: ServerState, symbols: Mapping[str, float]) -> Memory:
    return {symbol: state.memory[symbol] for symbol in symbols}
