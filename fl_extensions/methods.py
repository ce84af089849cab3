"""Loads methods, reducers, rules and optimizers from outside by name, and identifies their code.

A method is a function that returns an `algorithms.Method`, a reducer one that returns an `algorithms.Reducer`, a rule
for stale updates one that returns an `algorithms.Staleness`. A function without that annotation is refused and never
called. Optimizers are classes of torch.optim.Optimizer, by the
settings of this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

import algorithms as fl
from algorithms.optimizers.classes import BUILT_IN, Known, is_outside
from algorithms.parameters import AlgorithmError
from fl_extensions.importing import attribute_of, source_digest
from fl_extensions.naming import Kind, path_of


class NotListed(fl.AlgorithmError):
    """This machine's configuration does not list the `module:attribute`. Nothing was imported."""


def _kind(noun: str, group: str, example: str, built_in: Iterable[str]) -> Kind:
    return Kind(noun, group, example, fl.AlgorithmError, NotListed, dict.fromkeys(built_in, ""))


METHODS = _kind("algorithm", "impetus.algorithms", "my_methods:sign_momentum", fl.names())
REDUCERS = _kind("reducer", "impetus.reducers", "my_reducers:geometric_median", fl.BUILT_IN_REDUCERS)
STALENESS = _kind("staleness", "impetus.staleness", "my_rules:halving", fl.BUILT_IN_STALENESS)
OPTIMIZERS = replace(_kind("optimizer", "impetus.optimizers", "my_optimizers:Sophia", BUILT_IN), classes=True)


@dataclass(frozen=True, slots=True)
class Code:
    """Which code a name stands for on this machine."""

    name: str
    version: str
    """`__version__` of the module that defines it, or "". The author raises it when code in other modules changes."""
    source: str
    """"sha256:" and hex of the text of that module."""

    @property
    def facts(self) -> dict[str, str]:
        """The same as JSON values."""
        return {"name": self.name, "version": self.version, "source": self.source}


def load_method(name: str, listed: Collection[str] | None = None) -> Code | None:
    """Load a method, so that `algorithms.build` knows it. Returns its code; None for a built-in method.

    Args:
        name: a built-in method, an entry point of the group "impetus.algorithms", or `module:attribute`.
        listed: the `module:attribute` names that may be loaded, for a name from another machine. None allows all, for a
            name from this machine's user or configuration.

    Raises:
        NotListed: the name is not listed. Nothing was imported.
        AlgorithmError: the method cannot be loaded. An exception of its own code is the cause.
    """
    return _load(METHODS, name, listed, fl.add_method)


def load_reducer(name: str, listed: Collection[str] | None = None) -> Code | None:
    """Load a reducer, so that `algorithms.build_reducer` knows it. Like `load_method`, with "impetus.reducers"."""
    return _load(REDUCERS, name, listed, fl.add_reducer)


def load_staleness(name: str, listed: Collection[str] | None = None) -> Code | None:
    """Load a rule for stale updates, so that `algorithms.build_staleness` knows it. Like `load_method`."""
    return _load(STALENESS, name, listed, fl.add_staleness)


def _load(
    kind: Kind, name: str, listed: Collection[str] | None, add: Callable[[str, Callable[..., Any]], None]
) -> Code | None:
    if name in kind.built_in:
        return None
    builder = attribute_of(kind, path_of(kind, name, listed), name)
    add(name, builder)  # type: ignore[arg-type]  # it checks that this is a function with the right annotation
    digest = source_digest(builder)
    if digest is None:
        raise fl.AlgorithmError(
            f"the function of {kind.noun} {name} has no source here; define it in a file of your own: devices and"
            " server compare the text of its module"
        )
    version = getattr(sys.modules[getattr(builder, "__module__", "")], "__version__", "")
    return Code(name, version if isinstance(version, str) else "", f"sha256:{digest}")


def load_optimizers(listed: Iterable[str]) -> Known:
    """Import the classes that this machine's settings, or its user, list. Names of torch and built-in ones are skipped.

    Args:
        listed: as module:Class.

    Raises:
        AlgorithmError: there is no such module or attribute, or it is no optimizer.
    """
    classes: dict[str, type[Optimizer]] = {}
    for name in listed:
        if not is_outside(name):
            continue
        loaded = attribute_of(OPTIMIZERS, path_of(OPTIMIZERS, name), name)
        if not (isinstance(loaded, type) and issubclass(loaded, Optimizer)):
            raise AlgorithmError(f"expected a class of torch.optim.Optimizer, got {name}, a {type(loaded).__name__}")
        classes[name] = loaded
    return classes
