"""Composes a method from a drift correction, a server optimizer, client weights and a gradient rule.

    clients     d = a * g + u + mu * (y - x)                          correction.local_rule
    server      movement, next memory <- sums of the payloads         correction.advance
                next x <- x, movement                                 optimizer.step

Every correction can be combined with every server optimizer. One rule keeps them independent: a correction uses sums of
the clients' payloads and never x_{t+1} - x_t, so that the optimizer's momentum or scaling does not enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from algorithms import tree
from algorithms.aggregate import WEIGHTS
from algorithms.base import (
    BASIC_PAYLOADS,
    PAYLOAD_NAME,
    Algorithm,
    ClientContext,
    ClientUpdate,
    ComputedPayload,
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
from algorithms.outside_code import outside_code
from algorithms.parameters import AlgorithmError, Value
from algorithms.precision import low_dtypes, widened

Sums = Mapping[str, WeightedSum]
Normaliser = Literal["none", "fednova"]

SENT = "sent"
"""Name of the sent direction among the sums of `Correction.advance`. A server whose clients receive other values than
those of its memory, because the direction travels in an encoding, gives these values to its step by this name."""

ClientWeights = tuple[float, ...]
"""p_i of the cohort's updates, in their order."""


def mean_delta(p: ClientWeights, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
    """Dbar = sum_i p_i delta_i."""
    del cohort, round_info
    return {"Dbar": WeightedSum(p)}


def mean_delta_and_gradient(p: ClientWeights, cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
    """Dbar, and G = - sum_i p_i delta_i / (sum_k eta_k) in gradient units, with each client's own K_i steps.

    With one rate in all steps the divisor is eta_l K_i.
    """
    G = tuple(-p_i / round_info.sum_of_rates(client.num_steps) for p_i, client in zip(p, cohort, strict=True))
    return {"Dbar": WeightedSum(p), "G": WeightedSum(G)}


def _plain_rule(client: ClientContext) -> LocalRule:
    """d = g."""
    del client
    return LocalRule()


def _move_by_mean(memory: Memory, sums: Mapping[str, Tensors], round_info: RoundInfo) -> tuple[Tensors, Memory]:
    """The movement is Dbar; the memory stays."""
    del round_info
    return sums["Dbar"], memory


def _steps(client: UpdateInfo, round_info: RoundInfo) -> float:
    """K_i."""
    del round_info
    return float(client.num_steps)


@dataclass(frozen=True, slots=True)
class ClientState:
    """The state that each client keeps from round to round. The default is none."""

    symbols: tuple[str, ...] = ()
    """Symbols of model-sized tensors that start at zero. A client never sends them."""
    advance: Callable[[ClientContext, ClientUpdate], Memory] = lambda client, update: {}
    """(context, the update as admitted) -> next state."""


@dataclass(frozen=True, slots=True)
class PreparatoryExchange:
    """An exchange before the one that trains. The sums of its payloads, computed at x, give the direction."""

    payloads: tuple[Payload, ...]
    sums: Callable[[ClientWeights, Sequence[UpdateInfo], RoundInfo], Sums]
    direction: Callable[[Memory, Mapping[str, Tensors]], Tensors]
    """(memory, these sums) -> the direction of the exchange that trains."""
    computed: Mapping[Payload, ComputedPayload] = field(default_factory=dict)
    """Its meaning is that of the same field of Correction."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How clients correct for drift, with the state and the messages this needs. The default is no correction."""

    local_rule: Callable[[ClientContext], LocalRule] = _plain_rule
    """A client's context -> its rule."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Symbols of the server memory, each with the initial value of all entries."""
    sends: str | None = None
    """Symbol of the memory that is sent as the direction."""
    preparation: PreparatoryExchange | None = None
    """Instead of `sends`, for a round of two exchanges."""
    payloads: tuple[Payload, ...] = ("delta",)
    """Payloads of the exchange that trains: basic ones, and those of `computed`."""
    computed: Mapping[Payload, ComputedPayload] = field(default_factory=dict)
    """Payloads of the method's own, by the names that it gives them."""
    sums: Callable[[ClientWeights, Sequence[UpdateInfo], RoundInfo], Sums] = mean_delta
    """(p, cohort, round) -> the sums for `advance`; they include Dbar."""
    advance: Callable[[Memory, Mapping[str, Tensors], RoundInfo], tuple[Tensors, Memory]] = _move_by_mean
    """(memory, all sums of the round, round) -> (movement for the optimizer, next memory).

    With `sends`, the sums have the direction as it was sent, by the name SENT: the memory itself, or for a model of low
    precision the memory rounded to the model's dtypes.
    """
    client: ClientState = field(default_factory=ClientState)
    effective_steps: Callable[[UpdateInfo, RoundInfo], float] = _steps
    """FedNova's tau_i: -delta_i / eta_l for a constant gradient of 1."""
    objective: Objective = "uniform"
    """examples: the rule depends on each client's omega_i."""
    needs_population: bool = False
    needs_sgd: str = ""
    """Why its formulas hold only for local steps of plain SGD; empty: they hold for any."""
    needs_one_rate: bool = True
    """Whether those formulas need the same learning rate in all steps of a round, too."""
    own_steps: str = ""
    """Why its local steps cannot be those of another optimizer; empty: they can."""
    skipping: float = 0.0
    """Its meaning is that of the same field of Algorithm."""
    outer_decay_factor: float = 1.0
    """The decay factor (Algorithm.decay_factor) for the order that adds the decay after the mixing."""
    no_loop: str = ""
    """Why a training loop of a task's own cannot make its local steps; empty: it can, exactly or inexactly."""
    incompatible: Mapping[str, str] = field(default_factory=dict)
    """Option values that this correction cannot be combined with -> the reason."""


def _move(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
    """x + movement."""
    del round_info
    return tree.add(x, movement), memory


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """How the server model moves. The default adds the movement."""

    step: Callable[[Tensors, Memory, Tensors, RoundInfo], tuple[Tensors, Memory]] = _move
    """(x, memory, movement, round) -> (next x, next memory). The movement is added, not subtracted."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Its meaning is that of the same field of Correction."""
    units: Mapping[str, int] = field(default_factory=dict)
    """Power of eta_l in each symbol's unit: 1 for a mean of deltas, 2 for a mean of their squares, 0 if omitted."""


@dataclass(frozen=True, slots=True)
class Method:
    """The components that a method fixes. None: the run chooses by an option (see algorithms.registry)."""

    correction: Correction
    weights: Weights
    optimizer: Callable[..., ServerOptimizer] | None = None
    """Builder of the server optimizer; its parameters become the method's."""
    gradient: Literal["plain", "sam"] | None = None
    normaliser: Normaliser | None = None


@dataclass(frozen=True, slots=True)
class Components:
    """All components of an algorithm."""

    correction: Correction
    weights: Weights
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    gradient: GradientRule = field(default_factory=GradientRule)
    normaliser: Normaliser = "none"


def compose(name: str, parameters: Mapping[str, Value], components: Components) -> Algorithm:
    """Compose an algorithm from its components.

    Raises:
        AlgorithmError: correction and optimizer keep memory under the same symbol, or a payload is unknown.
    """
    correction, optimizer = components.correction, components.optimizer
    if clash := sorted(correction.memory.keys() & optimizer.memory.keys()):
        raise AlgorithmError(
            f"{name}: expected different memory symbols in correction and optimizer, got {clash} in both; rename one"
        )
    exchanges = _exchanges(name, components)
    for exchange in exchanges:
        _check_payloads(name, exchange)

    return Algorithm(
        name=name,
        parameters=parameters,
        init=_init(name, correction, optimizer),
        exchanges=exchanges,
        weights=WEIGHTS[components.weights],
        server_step=_server_step(name, correction, optimizer),
        gradient=components.gradient,
        client_rule=lambda client: replace(correction.local_rule(client), gradient=components.gradient),
        client_init=lambda x: {symbol: tree.full_like(widened(x), 0.0) for symbol in correction.client.symbols},
        next_client_state=correction.client.advance,
        restart=_restart(correction),
        keeps_client_state=correction.client != ClientState(),
        plain_steps=correction.local_rule is _plain_rule and components.gradient == GradientRule(),
        no_loop=_no_loop(components),
        objective=correction.objective,
        needs_population=correction.needs_population,
        needs_sgd=correction.needs_sgd or (_FEDNOVA if components.normaliser == "fednova" else ""),
        needs_one_rate=correction.needs_one_rate or components.normaliser == "fednova",
        own_steps=correction.own_steps,
        skipping=correction.skipping,
        decay_factor=correction.outer_decay_factor if components.gradient.order == "feddyn_code" else 1.0,
    )


_FEDNOVA = "tau_i counts a client's steps as steps of plain SGD"
GRADIENT_FROM_DELTA = "G = -delta / sum_k eta_k is the mean gradient of a client's steps only for plain SGD"
"""Why the sum G of `mean_delta_and_gradient` needs plain SGD."""


def _no_loop(components: Components) -> str:
    if components.normaliser == "fednova":
        return "it divides each update by its number of steps, and the number that a loop reports cannot be checked"
    return components.correction.no_loop


def _init(name: str, correction: Correction, optimizer: ServerOptimizer) -> Callable[[Tensors], ServerState]:
    starts = {**correction.memory, **optimizer.memory}

    def init(x: Tensors) -> ServerState:
        if not x:
            raise AlgorithmError(f"{name}: expected a model with trainable parameters, got none; is all of it frozen?")
        master = widened(x)
        memory = {symbol: tree.full_like(master, value) for symbol, value in starts.items()}
        return ServerState(master, memory, low_dtypes(x))

    return init


def _restart(correction: Correction) -> Callable[[ServerState], ServerState]:
    def restart(state: ServerState) -> ServerState:
        if correction.client == ClientState():
            return state
        initial = {symbol: tree.full_like(state.x, value) for symbol, value in correction.memory.items()}
        return state.replace(memory={**state.memory, **initial})

    return restart


class _Sums(dict[str, Tensors]):
    """Sums by name. A missing one is an error that names it."""

    def __init__(self, method: str, sums: Mapping[str, Tensors]) -> None:
        super().__init__(sums)
        self._method = method

    def __missing__(self, name: str) -> Tensors:
        raise AlgorithmError(
            f"{self._method}: expected the sum {name!r}, got {', '.join(self) or 'none'}; pass the sums of all "
            "exchanges of the round so far, which sum_exchange makes of all payloads"
        )


def _server_step(
    name: str, correction: Correction, optimizer: ServerOptimizer
) -> Callable[[ServerState, Mapping[str, Tensors], RoundInfo], ServerState]:
    def server_step(state: ServerState, sums: Mapping[str, Tensors], round_info: RoundInfo) -> ServerState:
        for symbol, total in sums.items():
            if symbol != SENT:
                tree.check_layout(state.x, total, f"sum {symbol!r}")
        memory, given = _select(name, state, correction.memory), _Sums(name, sums)
        if correction.sends is not None and SENT not in given:
            given[SENT] = state.as_sent(memory[correction.sends])
        with outside_code(f"algorithm {name}", AlgorithmError):
            movement, corrected = correction.advance(memory, given, round_info)
            x, optimized = optimizer.step(state.x, _select(name, state, optimizer.memory), movement, round_info)
        return state.replace(x=x, memory={**corrected, **optimized})

    return server_step


def _exchanges(name: str, components: Components) -> tuple[Exchange, ...]:
    correction, weigh = components.correction, WEIGHTS[components.weights]

    def sums(cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Sums:
        with outside_code(f"algorithm {name}", AlgorithmError):
            wanted = dict(correction.sums(weigh(cohort), cohort, round_info))
        if components.normaliser == "fednova":
            wanted["Dbar"] = _normalised(wanted["Dbar"], [correction.effective_steps(c, round_info) for c in cohort])
        return _for_admitted(wanted, cohort)

    def direction(state: ServerState, sums: Mapping[str, Tensors]) -> Tensors | None:
        if preparation is not None:
            memory = _select(name, state, correction.memory)
            return state.as_sent(preparation.direction(memory, _Sums(name, sums)))
        if correction.sends is None:
            return None
        return state.as_sent(_select(name, state, [correction.sends])[correction.sends])

    preparation = correction.preparation
    training = Exchange(correction.payloads, direction, sums, correction.computed)
    if preparation is None:
        return (training,)
    first = Exchange(
        preparation.payloads,
        lambda state, sums: None,
        lambda c, info: preparation.sums(weigh(c), c, info),
        preparation.computed,
    )
    return first, training


def _check_payloads(name: str, exchange: Exchange) -> None:
    if unknown := sorted(exchange.basic - set(BASIC_PAYLOADS)):
        raise AlgorithmError(
            f"{name}: expected the basic payloads {', '.join(BASIC_PAYLOADS)}, or payloads made of these with a rule "
            f"in `computed`; got {', '.join(unknown)}"
        )
    if wrong := sorted(payload for payload in exchange.payloads if not PAYLOAD_NAME.fullmatch(payload)):
        raise AlgorithmError(
            f'{name}: expected names of payloads of 1 to 64 of a-z A-Z 0-9 _ . - and not "buffers", got {wrong[0]!r}'
        )


def _normalised(Dbar: WeightedSum, tau: Sequence[float]) -> WeightedSum:
    """FedNova: p_i -> p_i * tau_eff / tau_i, tau_eff = sum p_i tau_i. Equal tau_i change nothing."""
    if len(set(tau)) == 1:
        return Dbar
    tau_eff = sum(p_i * tau_i for p_i, tau_i in zip(Dbar.coefficients, tau, strict=True))
    return WeightedSum(tuple(p_i * tau_eff / tau_i for p_i, tau_i in zip(Dbar.coefficients, tau, strict=True)))


def _for_admitted(wanted: Sums, cohort: Sequence[UpdateInfo]) -> Sums:
    """Coefficients for deltas as sent that give the sums of the deltas as admitted."""
    return {
        name: replace(row, coefficients=tuple(c * k.clip_factor for c, k in zip(row.coefficients, cohort, strict=True)))
        if row.payload == "delta"
        else row
        for name, row in wanted.items()
    }


def _select(method: str, state: ServerState, symbols: Iterable[str]) -> dict[str, Tensors]:
    if missing := [symbol for symbol in symbols if symbol not in state.memory]:
        raise AlgorithmError(
            f"{method}: expected the memory {', '.join(missing)} in the server's state, got "
            f"{', '.join(state.memory) or 'none'}; start from the method's init"
        )
    return {symbol: state.memory[symbol] for symbol in symbols}
