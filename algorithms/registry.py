"""All methods by name: builds an algorithm from a name and parameters, as a configuration or the wire gives them.

Besides its own parameters, a method has options for the components that it does not fix itself:

    server_optimizer   sgd, momentum, ...; its parameters have the prefix server_, as in server_beta, except eta_g;
                       its memory is server_m, server_v, ...
    momentum_units     parameter | gradient, for optimizers whose memory is in units of the model's parameters
    gradient           plain | sam; sam adds its radius rho, sam_p, the order of its norm, and sam_scope = model |
                       tensor, the scope of the norm
    normaliser         none | fednova
    order              paper | feddyn_code

A component that the method fixes is no option: FedAdam fixes its server optimizer and has that optimizer's parameters.

A method from outside this package is known once this process has called `add_method` for it. It has the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from algorithms import tree
from algorithms.base import Algorithm, GradientRule, Memory, Order, RoundInfo, Scope, Tensors
from algorithms.compose import Components, Method, Normaliser, ServerOptimizer, compose
from algorithms.methods.diloco import diloco
from algorithms.methods.fedavg import fedavg, sgd
from algorithms.methods.fedavgm import fedavgm, heavy_ball, nesterov
from algorithms.methods.fedcm import fedcm
from algorithms.methods.feddemon import demon, demon_adam, feddemon, feddemonadam
from algorithms.methods.feddyn import feddyn
from algorithms.methods.fednova import fednova
from algorithms.methods.fedopt import adagrad, adam, fedadagrad, fedadam, fedyogi, yogi
from algorithms.methods.fedprox import fedprox
from algorithms.methods.fedrobust import fedrobust
from algorithms.methods.fedsam import fedsam, mofedsam
from algorithms.methods.mfl import mfl
from algorithms.methods.mime import mime, mimelite
from algorithms.methods.proxskip import proxskip
from algorithms.methods.qg import qg
from algorithms.methods.scaffold import scaffold
from algorithms.methods.slowmo import slow_momentum, slowmo
from algorithms.parameters import (
    AlgorithmError,
    NonNegativePerRound,
    Parameter,
    Parameters,
    Range,
    Value,
    check_builder,
    declared,
    made_by,
    read_parameters,
    unknown,
)

_BUILDERS: tuple[Callable[..., Method], ...] = (
    fedavg,
    fedavgm,
    fedadagrad,
    fedyogi,
    fedadam,
    feddemon,
    feddemonadam,
    slowmo,
    diloco,
    fedprox,
    fednova,
    scaffold,
    proxskip,
    feddyn,
    fedcm,
    mimelite,
    mime,
    fedsam,
    mofedsam,
    fedrobust,
    qg,
    mfl,
)
METHODS: Mapping[str, Callable[..., Method]] = {builder.__name__: builder for builder in _BUILDERS}

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

_OUTSIDE: dict[str, Callable[..., Method]] = {}
"""Methods from outside this package, by the names that runs give them."""

_UNPREFIXED = "eta_g"


def names() -> tuple[str, ...]:
    """The names of the methods of this package, sorted."""
    return tuple(sorted(METHODS))


def add_method(name: str, builder: Callable[..., Method]) -> None:
    """Make a method from outside known in this process, with its parameters from the builder's signature.

    The builder is called once, with its defaults. It replaces an earlier one of the same name.

    Raises:
        AlgorithmError: a method of this package has the name, or the builder is not as `compose.Method` says.
    """
    if name in METHODS:
        raise AlgorithmError(f"algorithm {name}: expected a name that no method of this package has: choose another")
    check_builder(name, builder, Method)
    _built(name, builder, {})
    _OUTSIDE[name] = builder


def is_known(name: str) -> bool:
    """Whether `build` knows the method: it is of this package, or was added."""
    return name in METHODS or name in _OUTSIDE


def build(name: str, /, **parameters: object) -> Algorithm:
    """Build the method called `name`. Parameters have the paper's symbols as names; omitted ones have their defaults.

    Besides its own parameters, a method takes the options listed in this module's docstring.

    Raises:
        AlgorithmError: the method or a parameter is unknown, a value is out of range, or options are incompatible.
    """
    return _built(name, _builder(name), parameters)


def parameters_of(name: str, /, **parameters: object) -> Parameters:
    """The declarations of all parameters of a method with these options. Raises AlgorithmError as `build` does."""
    return _method(name, _builder(name), parameters)[1]


def _builder(name: str) -> Callable[..., Method]:
    builder = METHODS.get(name) or _OUTSIDE.get(name)
    if builder is None:
        raise AlgorithmError(unknown("algorithm", name, [*METHODS, *_OUTSIDE]))
    return builder


def _built(name: str, builder: Callable[..., Method], parameters: Mapping[str, object]) -> Algorithm:
    method, declarations = _method(name, builder, parameters)
    values = read_parameters(name, declarations, parameters)
    return compose(name, values, components_of(name, method, values))


def _method(name: str, builder: Callable[..., Method], parameters: Mapping[str, object]) -> tuple[Method, Parameters]:
    own = declared(builder)
    values = read_parameters(name, own, {key: value for key, value in parameters.items() if key in own})
    method = made_by(name, builder, values, Method)
    options = options_of(method, parameters)
    if clash := sorted(own.keys() & options.keys()):
        raise AlgorithmError(
            f"{name}, parameter {clash[0]!r}: expected a name that no option of every method has; rename it", clash[0]
        )
    return method, {**own, **options}


def options_of(method: Method, given: Mapping[str, object]) -> dict[str, Parameter]:
    """The method's options, with the parameters of the components that `given` selects."""
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
        parameters |= {
            "rho": Parameter(NonNegativePerRound, 0.1),
            "sam_p": Parameter(Annotated[float, Range(over=1)], 2.0),
            "sam_scope": Parameter(Scope, "model"),
        }
    if method.normaliser is None:
        parameters["normaliser"] = Parameter(Normaliser, "none")
    parameters["order"] = Parameter(Order, "paper")
    return parameters


def components_of(name: str, method: Method, chosen: Mapping[str, Any]) -> Components:
    """The components of a method for these options, which are complete and checked.

    Raises:
        AlgorithmError: the method is incompatible with an option. The message has the reason.
    """
    for option, value in chosen.items():
        if value in method.correction.incompatible:
            reason = method.correction.incompatible[str(value)]
            raise AlgorithmError(f"{name}: {option} = {value!r} cannot be combined with it: {reason}", option)
    build = method.optimizer or OPTIMIZERS[chosen["server_optimizer"]]
    prefixed = _prefixed if method.optimizer is None else str
    optimizer = build(**{own: chosen[prefixed(own)] for own in declared(build) if prefixed(own) in chosen})
    if method.optimizer is None:
        optimizer = _renamed(optimizer)
    if chosen.get("momentum_units") == "gradient":
        optimizer = in_gradient_units(optimizer)
    return Components(
        method.correction,
        method.weights,
        optimizer,
        GradientRule(
            chosen.get("rho", 0.0), chosen["order"], chosen.get("sam_scope", "model"), chosen.get("sam_p", 2.0)
        ),
        method.normaliser or chosen["normaliser"],
    )


def in_gradient_units(optimizer: ServerOptimizer) -> ServerOptimizer:
    """The optimizer with its memory rescaled to the round's eta_l first: v <- v * (eta_l(t) / eta_l(t-1))^power."""

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
    """The optimizer with prefixed memory symbols, so that they differ from a correction's, such as MimeLite's m."""
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
