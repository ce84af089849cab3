"""From a name and parameters, as they stand in a configuration or on the wire, to an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from algorithms.base import Algorithm
from algorithms.compose import Method, compose
from algorithms.fedavg import fedavg
from algorithms.fedavgm import fedavgm
from algorithms.fedcm import fedcm
from algorithms.feddemon import feddemon, feddemonadam
from algorithms.feddyn import feddyn
from algorithms.fednova import fednova
from algorithms.fedopt import fedadagrad, fedadam, fedyogi
from algorithms.fedprox import fedprox
from algorithms.fedrobust import fedrobust
from algorithms.fedsam import fedsam, mofedsam
from algorithms.mfl import mfl
from algorithms.mime import mime, mimelite
from algorithms.options import options_of, parts_of
from algorithms.parameters import AlgorithmError, declared, read_parameters, unknown
from algorithms.qg import qg
from algorithms.scaffold import scaffold
from algorithms.slowmo import slowmo

_BUILDERS: tuple[Callable[..., Method], ...] = (
    fedavg,
    fedavgm,
    fedadagrad,
    fedyogi,
    fedadam,
    feddemon,
    feddemonadam,
    slowmo,
    fedprox,
    fednova,
    scaffold,
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


def names() -> tuple[str, ...]:
    """The methods that `build` knows, sorted."""
    return tuple(sorted(METHODS))


def build(name: str, /, **parameters: object) -> Algorithm:
    """The method called `name`; parameters by the paper's symbols, defaults for those that are not given.

    Beside its own parameters a method has the options of `algorithms.options` that it leaves open.

    Raises:
        AlgorithmError: no such method, no such parameter, a value out of its range, or parts that do not go together.
    """
    if name not in METHODS:
        raise AlgorithmError(unknown("algorithm", name, METHODS))
    own = declared(METHODS[name])
    values = read_parameters(name, own, {key: value for key, value in parameters.items() if key in own})
    method = METHODS[name](**values)
    values = read_parameters(name, {**own, **options_of(method, parameters)}, parameters)
    return compose(name, values, parts_of(name, method, values))
