"""A method with another optimizer for its local steps, and the conditions under which its formulas still hold.

The method stays as it is: its rule gives d, and the optimizer gets d in place of the gradient. With state = device, the
optimizer's state is part of the client's state. With state = server, clients send it as payloads of their own, the
server's memory has their weighted means, and the next round's clients get these beside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from algorithms import tree
from algorithms.base import (
    Algorithm,
    ClientContext,
    ClientUpdate,
    ComputedPayload,
    Exchange,
    LocalRule,
    Memory,
    RoundInfo,
    ServerState,
    Tensors,
    UpdateInfo,
    WeightedSum,
)
from algorithms.optimizers.classes import NO_CLASSES, Known, averaged_symbols
from algorithms.optimizers.spec import PREFIX, OptimizerSpec, RateSchedule
from algorithms.optimizers.steps import NON_NEGATIVE, LocalOptimizer
from algorithms.parameters import AlgorithmError


def check_combination(
    algorithm: Algorithm, spec: OptimizerSpec, schedule: RateSchedule, *, inexact: bool = False
) -> None:
    """Raises AlgorithmError, with the reason, if a method cannot have this optimizer and schedule of a round's steps.

    inexact: the run accepts that the method's formulas do not hold.
    """
    if not spec.plain and algorithm.own_steps:
        raise AlgorithmError(
            f"{algorithm.name}: expected no other optimizer, because {algorithm.own_steps}; got {spec.name}",
            "optimizer",
        )
    if inexact or not algorithm.needs_sgd:
        return
    varies = algorithm.needs_one_rate and not schedule.constant
    for field, changed, shown in (
        ("optimizer", not spec.plain, spec.name),
        ("schedule", varies, f"kind = {schedule.kind}, warmup = {schedule.warmup:g}"),
    ):
        if changed:
            raise AlgorithmError(
                f"{algorithm.name}: {algorithm.needs_sgd}. Leave out local.{field}, choose another method, or set "
                f"local.inexact = true to train with it all the same; got {shown}",
                field,
            )


def with_optimizer(algorithm: Algorithm, spec: OptimizerSpec, known: Known = NO_CLASSES) -> Algorithm:
    """The method with this optimizer for its local steps. With plain SGD it is the method itself.

    Args:
        algorithm: of `build` or `compose`.
        spec: after `check_optimizer` and `check_combination`.
        known: optimizers of other packages. A server needs none.
    """
    if spec.plain:
        return algorithm
    made = replace(algorithm, client_rule=_client_rule(algorithm, spec, known))
    if spec.state == "device":
        return replace(made, next_client_state=_next_client_state(algorithm), keeps_client_state=True)
    return made if spec.state == "fresh" else _averaging(made, spec)


def averaged_state(algorithm: Algorithm, state: ServerState, round: int) -> Memory:
    """The averaged state of the optimizer for the clients of a round; empty in round 0, which has no average yet."""
    return {symbol: state.memory[symbol] for symbol in algorithm.averaged} if round else {}


def _client_rule(algorithm: Algorithm, spec: OptimizerSpec, known: Known) -> Callable[[ClientContext], LocalRule]:
    def client_rule(client: ClientContext) -> LocalRule:
        kept = client.state if spec.state == "device" else client.optimizer
        start = {symbol: tensors for symbol, tensors in kept.items() if symbol.startswith(PREFIX)}
        return replace(algorithm.client_rule(client), optimizer=LocalOptimizer(spec, known, start))

    return client_rule


def _next_client_state(algorithm: Algorithm) -> Callable[[ClientContext, ClientUpdate], Memory]:
    def next_client_state(client: ClientContext, update: ClientUpdate) -> Memory:
        own = {symbol: tensors for symbol, tensors in client.state.items() if not symbol.startswith(PREFIX)}
        return {**algorithm.next_client_state(replace(client, state=own), update), **update.optimizer}

    return next_client_state


def _averaging(algorithm: Algorithm, spec: OptimizerSpec) -> Algorithm:
    """The method whose server averages the optimizer's tensors, under their symbols with PREFIX."""
    symbols = tuple(f"{PREFIX}{symbol}" for symbol in averaged_symbols(spec))

    def init(x: Tensors) -> ServerState:
        state = algorithm.init(x)
        return state.replace(memory={**state.memory, **{symbol: tree.full_like(state.x, 0.0) for symbol in symbols}})

    def server_step(state: ServerState, sums: Mapping[str, Tensors], round_info: RoundInfo) -> ServerState:
        after = algorithm.server_step(
            state.replace(memory=_without(state.memory, symbols)), _without(sums, symbols), round_info
        )
        means = {symbol: _mean(symbol, sums[symbol]) for symbol in symbols}
        return after.replace(memory={**after.memory, **means})

    return replace(
        algorithm,
        init=init,
        server_step=server_step,
        exchanges=tuple(
            _sending(exchange, algorithm, symbols) if exchange.trains else exchange for exchange in algorithm.exchanges
        ),
        averaged=symbols,
    )


def _sending(exchange: Exchange, algorithm: Algorithm, symbols: Sequence[str]) -> Exchange:
    """The exchange with the optimizer's tensors among its payloads."""

    def sums(cohort: Sequence[UpdateInfo], round_info: RoundInfo) -> Mapping[str, WeightedSum]:
        p = algorithm.weights(cohort)
        return {**exchange.sums(cohort, round_info), **{symbol: WeightedSum(p, symbol) for symbol in symbols}}

    return replace(
        exchange,
        payloads=(*exchange.payloads, *symbols),
        sums=sums,
        computed={**exchange.computed, **{symbol: _payload(symbol) for symbol in symbols}},
    )


def _payload(symbol: str) -> ComputedPayload:
    def compute(client: ClientContext, update: ClientUpdate) -> Tensors:
        del client
        return update.optimizer[symbol]

    return ComputedPayload(("delta",), compute, wide=True)


def _without(named: Mapping[str, Tensors], symbols: Collection[str]) -> dict[str, Tensors]:
    return {symbol: tensors for symbol, tensors in named.items() if symbol not in symbols}


def _mean(symbol: str, mean: Tensors) -> Tensors:
    """The mean; never negative for squares, of which an optimizer takes the root."""
    return tree.map(lambda tensor: torch.clamp(tensor, min=0.0), mean) if symbol in NON_NEGATIVE else mean
