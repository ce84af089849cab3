"""The code of a run's method and reducer on this machine, where its user may load any module."""

from __future__ import annotations

from algorithms import AlgorithmError
from fl_extensions.methods import Code, load_method, load_reducer
from fl_server.round_config import Fingerprint
from fl_server.run_config import RunConfig


def with_code(run: RunConfig) -> RunConfig:
    """Load the run's method and reducer. Returns the run with the fingerprints of their code.

    Raises AlgorithmError if one cannot be loaded, and if a run of a ledger was made with other code.
    """
    algorithm, round_ = run.algorithm, run.round
    method = _checked(load_method(algorithm.name), algorithm.name, algorithm.fingerprint)
    reducer = _checked(load_reducer(round_.reducer), round_.reducer, round_.reducer_fingerprint)
    return run.model_copy(
        update={
            "algorithm": algorithm.model_copy(update={"fingerprint": method}),
            "round": round_.model_copy(update={"reducer_fingerprint": reducer}),
        }
    )


def _checked(code: Code | None, name: str, wanted: Fingerprint | None) -> Fingerprint | None:
    here = None if code is None else Fingerprint(version=code.version, source=code.source)
    if wanted not in (None, here):
        raise AlgorithmError(f"{name}: expected the run's code, {wanted}, got {here} here: install the run's code")
    return here
