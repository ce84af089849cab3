"""What a run with secure aggregation excludes: all that needs to see single updates, or to choose among them."""

from __future__ import annotations

import algorithms as fl
from fl_common.secure_aggregation.errors import PlanError
from fl_common.secure_aggregation.plan import plan_of
from fl_common.secure_aggregation.terms import Settings
from fl_server.aggregation.private_rules import shares_of
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.secure_aggregation import SecureAggregationSection
from protos.layout import Layout

MOST_CLIENTS = 500
"""Clients of a cohort, whose keys and certificates fit into one message."""
_SINGLE = "the coordinator sees no single update"
_STATELESS = "a client keeps no state in such a run, and sends its delta alone"
_CLIP = f"secure_aggregation.clip takes its place, on the devices, for {_SINGLE}"


def settings_of(section: SecureAggregationSection) -> Settings:
    """The protocol's own settings."""
    return Settings(section.min_clients, section.max_corrupt, section.max_dropped, section.suite)


def check_secure_aggregation(config: RunConfig) -> None:
    """Raises InvalidInput, with the reason, for a setting that secure aggregation excludes."""
    section, round_ = config.secure_aggregation, config.round
    if section is None:
        return
    optimizer_state = "fresh" if config.local.optimizer is None else config.local.optimizer.state
    wanted: list[tuple[str, object, object, str]] = [
        ("round.close", round_.close, "cohort", "masks are of one cohort, so the others would be lost"),
        ("round.reducer", round_.reducer, "mean", f"{_SINGLE}, which other reducers compare"),
        ("round.max_update_norm", round_.max_update_norm, 0.0, _CLIP),
        ("round.clip_update_norm", round_.clip_update_norm, 0.0, _CLIP),
        ("round.max_relative_norm", round_.max_relative_norm, 0.0, _CLIP),
        ("round.max_relative_payload", round_.max_relative_payload, 0.0, _CLIP),
        ("round.max_client_share", round_.max_client_share, 0.0, "secure_aggregation.max_examples limits weights"),
        ("encodings.update", config.encodings.update, "plain", "secure_aggregation.bits is their encoding"),
        ("encodings.reference", config.encodings.reference, "none", "secure_aggregation.bits is their encoding"),
        ("personal", list(config.personal), [], _STATELESS),
        ("local.continue_data", config.local.continue_data, False, _STATELESS),
        ("local.optimizer.state", optimizer_state, "fresh", _STATELESS),
    ]  # fmt: skip
    for field, came, right, why in wanted:
        if came != right:
            raise InvalidInput(field, f"{right!r} with [secure_aggregation]: {why}", came)
    if config.client_privacy is not None:
        expected = 'unit = "record" with [secure_aggregation]: its account needs to see each update'
        raise InvalidInput("privacy.unit", expected, "client")
    cohort = round_.clients_per_round if round_.sampling == "fixed" else config.least
    if cohort > MOST_CLIENTS:
        expected = f"at most {MOST_CLIENTS} with [secure_aggregation]: each client gets the certificates of all"
        raise InvalidInput("round.clients_per_round", expected, cohort)
    try:
        plan_of(settings_of(section), cohort)
    except (PlanError, ValueError) as error:
        where = "round.clients_per_round" if round_.sampling == "fixed" else "round.min_accepted"
        raise InvalidInput(where, f"a cohort that the shares can be had with: {error}", cohort) from error


def check_summed(config: RunConfig, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput unless all sums of the method are multiples of the clients' mean delta."""
    section, name, [first, *more] = config.secure_aggregation, algorithm.name, algorithm.exchanges
    if section is None:
        return
    if more or first.payloads != ("delta",) or algorithm.keeps_client_state:
        expected = f"a method whose clients send their delta alone, with [secure_aggregation]: {_SINGLE}"
        raise InvalidInput("algorithm.name", expected, name)
    if len({shares_of(algorithm, examples, 1) for examples in (1, 7)}) > 1 or algorithm.objective != "uniform":
        if algorithm.objective != "uniform" or not _by_examples_alone(algorithm):
            expected = 'a method with objective = "uniform" with [secure_aggregation]'
            raise InvalidInput("algorithm.parameters", expected, name)
        if section.max_examples is None:
            expected = f'the examples of the heaviest client, or weights = "uniform": {name} weights by examples'
            raise InvalidInput("secure_aggregation.max_examples", expected, "none")
    if config.local.steps is None and len({shares_of(algorithm, 1, steps) for steps in (1, 7)}) > 1:
        expected = f"a number of steps with [secure_aggregation]: {name} divides each update by its steps"
        raise InvalidInput("local.steps", expected, "none")


def _by_examples_alone(algorithm: fl.Algorithm) -> bool:
    """Whether a client's coefficients are proportional to its examples."""
    # Of one or three examples beside a client with one: shares of 1/2 and 3/4.
    shares = zip(shares_of(algorithm, 1, 1), shares_of(algorithm, 3, 1), strict=True)
    return all(abs(3 * one - 2 * three) <= 1e-9 * abs(three) for (_, _, one), (_, _, three) in shares)


def check_secure_model(config: RunConfig, layout: Layout) -> None:
    """Raises InvalidInput for a model with running statistics: their range is unknown, so they cannot be rounded."""
    floating = [entry.name for entry in layout.entries if not entry.trainable and entry.dtype.is_floating_point]
    if config.secure_aggregation is not None and floating:
        expected = "a model without running statistics with [secure_aggregation], such as one with group norms"
        raise InvalidInput("task", expected, f"the buffers {', '.join(floating[:3])}")
