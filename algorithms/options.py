"""What a run chooses beside a method's own parameters: the parts that go with any correction.

    server_optimizer   sgd, momentum, ...; its parameters are written server_beta, server_tau, ..., but eta_g as it is,
                       and what it keeps is server_m, server_v, ...
    momentum_units     parameter | gradient, for optimizers whose memory is in units of the model's parameters
    gradient           plain | sam, and then its radius rho and sam_scope = model | tensor, what one norm is taken over
    normaliser         none | fednova
    order              paper | feddyn_code

A part that a method fixes is no option of it: FedAdam has its server optimizer, whose parameters are FedAdam's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from algorithms import tree
from algorithms.base import GradientRule, Memory, Order, RoundInfo, Scope, Tensors
from algorithms.compose import Method, Normaliser, Parts, ServerOptimizer
from algorithms.fedavgm import heavy_ball, nesterov
from algorithms.feddemon import demon, demon_adam
from algorithms.fedopt import adagrad, adam, yogi
from algorithms.parameters import AlgorithmError, NonNegative, Parameter, Value, declared
from algorithms.sgd import sgd
from algorithms.slowmo import slow_momentum

OPTIMIZERS: Mapping[str, Callable[..., ServerOptimizer]] = {
    "sgd": sgd,
    "momentum": heavy_ball,
    "nesterov": nesterov,
    "slowmo": slow_momentum,
    "demon": demon,
    "adagrad": adagrad,
    "yogi": yogi,
    "adam": adam,
    "demon_adam": demon_adam,
}
GRADIENTS = ("plain", "sam")

_UNPREFIXED = "eta_g"


def options_of(method: Method, given: Mapping[str, object]) -> dict[str, Parameter]:
    """The options that the method leaves open, with the parameters of what `given` chooses."""
    parameters: dict[str, Parameter] = {}
    optimizer: Callable[..., ServerOptimizer] | None = method.optimizer
    if optimizer is None:
        parameters["server_optimizer"] = Parameter(_one_of(OPTIMIZERS), "sgd")
        optimizer = OPTIMIZERS.get(str(given.get("server_optimizer", "sgd")), sgd)
        parameters |= {_prefixed(name): parameter for name, parameter in declared(optimizer).items()}
    else:
        parameters |= declared(optimizer)
    if optimizer().units:
        parameters["momentum_units"] = Parameter(Literal["parameter", "gradient"], "parameter")
    if method.gradient is None:
        parameters["gradient"] = Parameter(_one_of(GRADIENTS), "plain")
    if (method.gradient or given.get("gradient")) == "sam":
        parameters |= {"rho": Parameter(NonNegative, 0.1), "sam_scope": Parameter(Scope, "model")}
    if method.normaliser is None:
        parameters["normaliser"] = Parameter(Normaliser, "none")
    parameters["order"] = Parameter(Order, "paper")
    return parameters


def parts_of(name: str, method: Method, chosen: Mapping[str, Any]) -> Parts:
    """The parts of a method with the options chosen, all of them checked and with values.

    Raises:
        AlgorithmError: the method cannot be combined with one of them; says why.
    """
    for option, value in chosen.items():
        if value in method.correction.refuses:
            reason = method.correction.refuses[str(value)]
            raise AlgorithmError(f"{name}: {option} = {value!r} cannot be combined with it: {reason}")
    build = method.optimizer or OPTIMIZERS[chosen["server_optimizer"]]
    prefixed = _prefixed if method.optimizer is None else str
    optimizer = build(**{own: chosen[prefixed(own)] for own in declared(build)})
    if method.optimizer is None:
        optimizer = _renamed(optimizer)
    if chosen.get("momentum_units") == "gradient":
        optimizer = in_gradient_units(optimizer)
    return Parts(
        method.correction,
        method.weights,
        optimizer,
        GradientRule(chosen.get("rho", 0.0), chosen["order"], chosen.get("sam_scope", "model")),
        method.normaliser or chosen["normaliser"],
    )


def in_gradient_units(optimizer: ServerOptimizer) -> ServerOptimizer:
    """The optimizer with its memory brought to the round's eta_l first: v <- v * (eta_l(t) / eta_l(t-1))^power."""

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        ratio = round_info.learning_rate / (round_info.previous_learning_rate or round_info.learning_rate)
        if ratio != 1.0:
            memory = {
                symbol: tree.scale(tensors, ratio ** optimizer.units.get(symbol, 0))
                for symbol, tensors in memory.items()
            }
        return optimizer.step(x, memory, movement, round_info)

    return ServerOptimizer(step, optimizer.memory, optimizer.units)


def _renamed(optimizer: ServerOptimizer) -> ServerOptimizer:
    """The optimizer with its memory under names that no correction has: MimeLite keeps an m of its own."""
    names = {symbol: _prefixed(symbol) for symbol in optimizer.memory}

    def step(x: Tensors, memory: Memory, movement: Tensors, round_info: RoundInfo) -> tuple[Tensors, Memory]:
        x, after = optimizer.step(x, {own: memory[name] for own, name in names.items()}, movement, round_info)
        return x, {name: after[own] for own, name in names.items()}

    memory = {name: optimizer.memory[own] for own, name in names.items()}
    return ServerOptimizer(step, memory, {names[own]: power for own, power in optimizer.units.items()})


def _prefixed(name: str) -> str:
    return name if name == _UNPREFIXED else f"server_{name}"


def _one_of(names: Mapping[str, object] | tuple[str, ...]) -> Value | Any:
    return Literal[tuple(names)]
