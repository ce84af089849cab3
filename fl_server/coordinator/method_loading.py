"""A run's method and reducer from outside, loaded only where this coordinator's own configuration allows it.

As for tasks, a run may name a built-in one, an entry point of an installed package, or a `module:attribute` that
server.toml lists, and nothing else. The run's configuration keeps the fingerprint of the code: a coordinator that has
other code after a restart does not go on with the run, whose rounds could not be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from algorithms import AlgorithmError
from fl_extensions.methods import METHODS, REDUCERS, Code, NotListed, load_method, load_reducer
from fl_extensions.naming import Kind, comma_separated, is_known, unknown
from fl_server.config import ServerConfig
from fl_server.errors import InvalidInput
from fl_server.round_config import Fingerprint
from fl_server.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class _Part:
    """The method or the reducer in a run's configuration."""

    kind: Kind
    load: Callable[[str, Collection[str]], Code | None]
    field: str
    """Of its name in the configuration."""
    key: str
    """Of server.toml, with the names that may be loaded."""


_METHOD = _Part(METHODS, load_method, "algorithm.name", "algorithms")
_REDUCER = _Part(REDUCERS, load_reducer, "round.reducer", "reducers")


def load_code(config: RunConfig, settings: ServerConfig, *, ended: bool = False) -> RunConfig:
    """Load the method and the reducer of a run. Returns its configuration with the fingerprints of their code.

    ended: the run is over and is only shown, so other code is no obstacle, and the fingerprints stay.

    Raises InvalidInput for one that is not allowed, without importing anything; for one that cannot be loaded; and for
    one whose code is not that of the configuration.
    """
    algorithm, round_ = config.algorithm, config.round
    method = _loaded(_METHOD, algorithm.name, settings.algorithms)
    reducer = _loaded(_REDUCER, round_.reducer, settings.reducers)
    if ended:
        return config
    algorithm = algorithm.model_copy(update={"fingerprint": _checked(_METHOD, method, algorithm.fingerprint)})
    round_ = round_.model_copy(update={"reducer_fingerprint": _checked(_REDUCER, reducer, round_.reducer_fingerprint)})
    return config.model_copy(update={"algorithm": algorithm, "round": round_})


def _loaded(part: _Part, name: str, listed: Collection[str]) -> Code | None:
    kind = part.kind
    if not is_known(kind, name):
        raise InvalidInput(part.field, *unknown(kind, name))
    try:
        return part.load(name, listed)
    except NotListed as error:
        raise InvalidInput(
            part.field,
            f"{kind.one} that this coordinator may load: built in ({', '.join(kind.built_in)}), an entry point of an"
            f" installed package, or listed under `{part.key}` in its server.toml ({comma_separated(listed)})",
            name,
        ) from error
    except AlgorithmError as error:
        raise InvalidInput(part.field, f"{kind.one} that this coordinator can load", error) from error


def _checked(part: _Part, code: Code | None, wanted: Fingerprint | None) -> Fingerprint | None:
    """The fingerprint of the code that is here. wanted: the configuration's."""
    here = None if code is None else Fingerprint(version=code.version, source=code.source)
    if wanted is not None and wanted != here:
        shown = "no fingerprint, for it is built in" if here is None else f"{here} on this coordinator"
        raise InvalidInput(
            part.field,
            f"the {part.kind.noun}'s code that the run was made with, {wanted}",
            f"{shown}: install that code again, or create another run with this one",
        )
    return here
