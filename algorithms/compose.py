"""A method from its parts: a correction, a server optimizer, and weights.

    clients     d = a * g + u + mu * (y - x)                          correction.local_rule
    server      movement, next memory <- sums over the deltas         correction.advance
                x <- x + (what the optimizer makes of the movement)   optimizer.step

Every correction goes with every server optimizer. What keeps them apart is one rule: a correction learns from sums over
the clients' deltas, never from x_{t+1} - x_t, so that the optimizer's momentum or scaling cannot leak into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from algorithms import tree
from algorithms.aggregate import WEIGHTS
from algorithms.base import Algorithm, LocalRule, RoundInfo, ServerState, Tensors, UpdateInfo, WeightedSum, Weights
from algorithms.parameters import AlgorithmError, Value

Memory = Mapping[str, Tensors]
"""Model-sized tensors that a part keeps from round to round, by the paper's symbol."""


def _plain_rule(direction: Tensors | None) -> LocalRule:
    """d = g."""
    del direction
    return LocalRule()


def _mean_delta(p: tuple[float, ...], cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Mapping[str, WeightedSum]:
    """Dbar = sum_i p_i delta_i."""
    del cohort, round_info
    return {"Dbar": WeightedSum(p)}


def _move_by_mean(memory: Memory, sums: Mapping[str, Tensors]) -> tuple[Tensors, Memory]:
    """The movement is Dbar; no memory changes."""
    return sums["Dbar"], memory


@dataclass(frozen=True, slots=True)
class Correction:
    """How clients correct for drift, and what the server keeps and sends for it. As it is: no correction."""

    local_rule: Callable[[Tensors | None], LocalRule] = _plain_rule
    """What was sent down -> the clients' rule."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Symbols of what the server keeps, with the value that every entry starts from."""
    sends: str | None = None
    """Symbol of the memory that goes down beside the model."""
    sums: Callable[[tuple[float, ...], Sequence[UpdateInfo], RoundInfo], Mapping[str, WeightedSum]] = _mean_delta
    """(p, cohort, round) -> the sums over deltas that `advance` wants."""
    advance: Callable[[Memory, Mapping[str, Tensors]], tuple[Tensors, Memory]] = _move_by_mean
    """(memory, those sums) -> (the movement that the server optimizer is fed with, next memory)."""


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """How the server model moves."""

    step: Callable[[Tensors, Memory, Tensors, RoundInfo], tuple[Tensors, Memory]]
    """(x, memory, movement, round) -> (next x, next memory). The movement points forward: it is added."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """As in Correction."""


@dataclass(frozen=True, slots=True)
class Method:
    """The parts of one method; `compose` joins them."""

    correction: Correction
    optimizer: ServerOptimizer
    weights: Weights


def compose(name: str, parameters: Mapping[str, Value], method: Method) -> Algorithm:
    """The algorithm that the parts make together.

    Raises:
        AlgorithmError: both parts keep memory under one symbol.
    """
    correction, optimizer, weigh = method.correction, method.optimizer, WEIGHTS[method.weights]
    if clash := sorted(correction.memory.keys() & optimizer.memory.keys()):
        raise AlgorithmError(f"{name}: expected parts that keep different memory, got {clash} in both; rename one")

    def init(x: Tensors) -> ServerState:
        if not x:
            raise AlgorithmError(f"{name}: expected a model with trainable parameters, got none; is all of it frozen?")
        starts = {**correction.memory, **optimizer.memory}
        return ServerState(x, {symbol: tree.full_like(x, value) for symbol, value in starts.items()})

    def direction(state: ServerState) -> Tensors | None:
        return None if correction.sends is None else state.memory[correction.sends]

    def sums(cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Mapping[str, WeightedSum]:
        return correction.sums(weigh(cohort), cohort, round_info)

    def server_step(state: ServerState, sums: Mapping[str, Tensors], round_info: RoundInfo) -> ServerState:
        for symbol, total in sums.items():
            tree.check_layout(state.x, total, f"sum {symbol!r}")
        movement, corrected = correction.advance(_part(state, correction.memory), sums)
        x, optimized = optimizer.step(state.x, _part(state, optimizer.memory), movement, round_info)
        return ServerState(x, {**corrected, **optimized})

    return Algorithm(name, parameters, init, direction, correction.local_rule, weigh, sums, server_step)


def _part(state: ServerState, symbols: Mapping[str, float]) -> Memory:
    return {symbol: state.memory[symbol] for symbol in symbols}
