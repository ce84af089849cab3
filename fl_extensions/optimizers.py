"""Loads optimizers from outside for local steps: classes of torch.optim.Optimizer, by the settings of this machine."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from torch.optim import Optimizer

from algorithms.optimizers.classes import BUILT_IN, Known, is_outside
from algorithms.parameters import AlgorithmError
from fl_extensions.importing import attribute_of
from fl_extensions.methods import NotListed
from fl_extensions.naming import Kind, path_of

OPTIMIZERS = Kind(
    "optimizer",
    "impetus.optimizers",
    example="my_optimizers:Sophia",
    error=AlgorithmError,
    not_listed=NotListed,
    built_in=MappingProxyType(dict.fromkeys(BUILT_IN, "")),
    classes=True,
)


def load_optimizers(listed: Iterable[str]) -> Known:
    """Import the classes that this machine's settings, or its user, list. Names of torch and built-in ones are skipped.

    Args:
        listed: as module:Class.

    Raises:
        AlgorithmError: there is no such module or attribute, or it is no optimizer.
    """
    found: dict[str, type[Optimizer]] = {}
    for name in listed:
        if not is_outside(name):
            continue
        loaded = attribute_of(OPTIMIZERS, path_of(OPTIMIZERS, name), name)
        if not (isinstance(loaded, type) and issubclass(loaded, Optimizer)):
            raise AlgorithmError(f"expected a class of torch.optim.Optimizer, got {name}, a {type(loaded).__name__}")
        found[name] = loaded
    return found
