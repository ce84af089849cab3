"""Methods and optimizers from outside that this device can train with: loaded once at the start, by its own settings.

Nothing that a coordinator names is imported: a method that is not loaded here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import structlog

from algorithms import AlgorithmError, names
from algorithms.optimizers.classes import Known
from fl_client.errors import ConfigError, WorkFailed
from fl_extensions.methods import METHODS, load_method
from fl_extensions.naming import installed
from fl_extensions.optimizers import load_optimizers
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

log = structlog.get_logger()

Methods = Mapping[str, training_pb2.TaskFingerprint]
"""The fingerprint of each method's code, by the method's name."""
NO_METHODS: Methods = MappingProxyType({})


def load_methods(listed: Sequence[str]) -> Methods:
    """Load the methods that installed packages register, and those that the device's settings list.

    An installed method that cannot be loaded is left out, with a warning. Raises ConfigError for a listed one.
    """
    found: dict[str, training_pb2.TaskFingerprint] = {}
    for name in [*installed(METHODS), *listed]:
        try:
            code = load_method(name)
        except AlgorithmError as error:
            if name in listed:
                raise ConfigError(f"algorithms: {error}") from error
            log.warning("method_not_loaded", method=name, error=str(error), todo="repair or uninstall its package")
            continue
        if code is not None:
            found[name] = training_pb2.TaskFingerprint(version=code.version, source=code.source)
    return found


def load_optimizers_of(listed: Sequence[str]) -> Known:
    """Load the optimizers that the device's settings list. Raises ConfigError for one that cannot be used."""
    try:
        return load_optimizers(listed)
    except AlgorithmError as error:
        raise ConfigError(f"optimizers: {error}") from error


def offers(methods: Methods) -> list[pb.MethodOffer]:
    """The methods as a registration offers them."""
    return [pb.MethodOffer(name=name, fingerprint=methods[name]) for name in sorted(methods)]


def check_method(spec: training_pb2.AlgorithmSpec, methods: Methods) -> None:
    """Raises WorkFailed unless the method is built in, or is here with the coordinator's code."""
    if spec.name in names():
        return
    here = methods.get(spec.name)
    if here is None:
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"algorithm {spec.name!r}: expected a built-in one ({', '.join(names())}) or one of this device's own"
            f" ({', '.join(sorted(methods)) or 'none'}): install its package here, or list it under `algorithms` in"
            " client.toml",
        )
    if spec.fingerprint != here:
        raise WorkFailed(
            pb.FAILURE_REASON_FINGERPRINT,
            f"algorithm {spec.name}: expected the coordinator's code, version {spec.fingerprint.version!r}"
            f" {spec.fingerprint.source}, got version {here.version!r} {here.source} here: install the same version on"
            " both sides",
        )
