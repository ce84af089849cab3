"""What a run with `close = "buffer"` excludes: all that needs one model, or one cohort, for all clients of a step.

Secure aggregation and client-level privacy exclude such runs themselves (`secure_rules`, `private_rules`).
"""

from __future__ import annotations

import algorithms as fl
from algorithms.buffered import refusal
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.sections import StalenessSection

_STATE = "a state of a device is valid only once its last update has counted, and a client begins again before that"


def staleness_rule(config: RunConfig) -> fl.Staleness:
    """The run's weights by staleness. Raises InvalidInput for a rule or a value that is wrong."""
    section = config.round.staleness or StalenessSection()
    try:
        return fl.build_staleness(section.kind, **section.values)
    except fl.AlgorithmError as error:
        raise InvalidInput(f"round.staleness.{error.parameter or 'kind'}", "a rule with its values", error) from error


def check_buffered(config: RunConfig, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput, with the reason, for a setting or a method that a run with a buffer excludes."""
    if config.round.close != "buffer":
        return
    wanted: list[tuple[str, object, object, str]] = [
        ("round.reducer", config.round.reducer, "mean", "robust reducers compare updates of one model"),
        ("round.max_client_share", config.round.max_client_share, 0.0, "a client may be in a buffer more than once"),
        ("encodings.reference", config.encodings.reference, "none", "updates are read before their step"),
        ("personal", list(config.personal), [], _STATE),
        ("local.continue_data", config.local.continue_data, False, _STATE),
        ("encodings.update", "sparse" if config.encodings.sparse else "", "", f"a sparse one leaves a rest: {_STATE}"),
    ]  # fmt: skip
    for field, came, right, why in wanted:
        if came != right:
            raise InvalidInput(field, f'{right!r} with round.close = "buffer": {why}', came)
    if why := refusal(algorithm):
        field = "local.optimizer" if config.local.optimizer is not None else "algorithm.name"
        raise InvalidInput(field, f'another one with round.close = "buffer": {why}', algorithm.name)
    staleness_rule(config)
