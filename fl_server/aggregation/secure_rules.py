"""What a run with secure aggregation excludes: all that needs to see single updates, or to choose among them."""

from __future__ import annotations

import algorithms as fl
from algorithms.masked_sums import Summand
from algorithms.optimizers.spec import RateSchedule
from fl_common.secure_aggregation.errors import PlanError
from fl_common.secure_aggregation.plan import plan_of
from fl_common.secure_aggregation.terms import Settings
from fl_server.aggregation.secure_sum import summands_in
from fl_server.errors import InvalidInput
from fl_server.rounds.metrics import by_clients
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.privacy import SecureAggregationSection
from protos.layout import Layout

MOST_CLIENTS = 500
"""Clients of a cohort, whose keys and certificates fit into one message."""
_SINGLE = "the coordinator sees no single update"
_CLIP = f"secure_aggregation.clip takes its place, on the devices, for {_SINGLE}"


def settings_of(section: SecureAggregationSection) -> Settings:
    """The protocol's own settings."""
    return Settings(section.min_clients, section.max_corrupt, section.max_dropped, section.suite)


def check_secure_aggregation(config: RunConfig) -> None:
    """Raises InvalidInput, with the reason, for a setting that secure aggregation excludes."""
    section, round_ = config.secure_aggregation, config.round
    if section is None:
        return
    wanted: list[tuple[str, object, object, str]] = [
        ("round.close", round_.close, "cohort", "masks are of one cohort, so the others would be lost"),
        ("round.reducer", round_.reducer, "mean", f"{_SINGLE}, which other reducers compare"),
        ("round.max_update_norm", round_.max_update_norm, 0.0, _CLIP),
        ("round.clip_update_norm", round_.clip_update_norm, 0.0, _CLIP),
        ("round.max_relative_norm", round_.max_relative_norm, 0.0, _CLIP),
        ("round.max_relative_payload", round_.max_relative_payload, 0.0, _CLIP),
        ("round.max_client_share", round_.max_client_share, 0.0, "secure_aggregation.max_examples limits weights"),
        ("encodings.update", config.encodings.update, "plain", "secure_aggregation.bits is their encoding"),
        ("evaluation.clients", config.evaluation.clients, 0, "the clients of a round measure the model they received"),
        ("evaluation.averaged_on_clients", config.evaluation.averaged_on_clients, False, "they receive no such model"),
        ("encodings.reference", config.encodings.reference, "none", "secure_aggregation.bits is their encoding"),
    ]  # fmt: skip
    for field, came, right, why in wanted:
        if came != right:
            raise InvalidInput(field, f"{right!r} with [secure_aggregation]: {why}", came)
    if config.local.optimizer is not None and config.local.optimizer.state == "server":
        expected = '"fresh" or "device" with [secure_aggregation]: a rounded second moment may be negative'
        raise InvalidInput("local.optimizer.state", expected, "server")
    if by_clients(config.stop.metric):
        expected = "a metric of the server with [secure_aggregation]: sums over clients are of the round before"
        raise InvalidInput("stop.metric", expected, config.stop.metric)
    cohort = round_.clients_per_round if round_.sampling == "fixed" else config.least
    if cohort > MOST_CLIENTS:
        expected = f"at most {MOST_CLIENTS} with [secure_aggregation]: each client gets the certificates of all"
        raise InvalidInput("round.clients_per_round", expected, cohort)
    try:
        plan_of(settings_of(section), cohort)
    except (PlanError, ValueError) as error:
        where = "round.clients_per_round" if round_.sampling == "fixed" else "round.min_accepted"
        raise InvalidInput(where, f"a cohort that the shares can be had with: {error}", cohort) from error


def check_summed(config: RunConfig, algorithm: fl.Algorithm, schedule: RateSchedule) -> None:
    """Raises InvalidInput unless all sums of the method are made of sums that clients can contribute to alone.

    schedule: of the learning rate over the local steps.
    """
    section, name = config.secure_aggregation, algorithm.name
    if section is None:
        return
    if len(algorithm.exchanges) > 1:
        expected = (
            "a method with one exchange, such as mimelite, with [secure_aggregation]: what follows from the sum of a"
            " first one would need keys of its own"
        )
        raise InvalidInput("algorithm.name", expected, name)
    if algorithm.objective != "uniform":
        expected = (
            'objective = "uniform" with [secure_aggregation], or a method with weights = "examples" and'
            " secure_aggregation.max_examples: such a state at the server is of weights that are no part of the sums"
        )
        raise InvalidInput("algorithm.parameters", expected, f'{name} with objective = "{algorithm.objective}"')
    parts = _parts_of(config, algorithm, schedule)
    if section.max_examples is None and any(part.by_examples for part in parts):
        expected = f'the examples of the heaviest client, or weights = "uniform": {name} weights by examples'
        raise InvalidInput("secure_aggregation.max_examples", expected, "none")
    if section.min_steps is None and any(part.per_step for part in parts):
        expected = (
            f"the steps of the client with the fewest, or a number of local.steps: {name} divides updates by steps"
        )
        raise InvalidInput("secure_aggregation.min_steps", expected, "none")
    others = {part.payload for part in parts} - {"delta"}
    for payload in sorted(others ^ section.clips.keys()):
        expected = f"the largest L2 norm of the payload, which {name} sums" if payload in others else "no such payload"
        raise InvalidInput(f"secure_aggregation.clips.{payload}", expected, section.clips.get(payload, "none"))
    if algorithm.keeps_client_state and len(parts) > len({part.payload for part in parts}):
        expected = (
            f"a number of steps, and uniform weights, with [secure_aggregation]: a client's state in {name} has to be"
            " made of the numbers in the sum, and two sums of its delta are rounded apart"
        )
        raise InvalidInput("local.steps", expected, "none")


def _parts_of(config: RunConfig, algorithm: fl.Algorithm, schedule: RateSchedule) -> set[Summand]:
    """What the clients contribute to the method's sums. Raises InvalidInput if a sum is not made of such parts."""
    name, parts, equal = algorithm.name, set[Summand](), summands_in(1, algorithm, schedule)
    for symbol, part in summands_in(config.local.steps, algorithm, schedule).items():
        if part is None and equal[symbol] is not None:
            expected = (
                f"a number of steps with [secure_aggregation]: {name} needs the steps of each client, or their mean"
            )
            raise InvalidInput("local.steps", expected, "none")
        if part is None:
            expected = (
                f"a method whose coefficients are one number for all clients, by examples or by steps, with"
                f" [secure_aggregation]: {_SINGLE}"
            )
            raise InvalidInput("algorithm.name", expected, name)
        parts.add(part)
    return parts


def check_secure_model(config: RunConfig, layout: Layout) -> None:
    """Raises InvalidInput for a model with running statistics: their range is unknown, so they cannot be rounded."""
    floating = [entry.name for entry in layout.entries if not entry.trainable and entry.dtype.is_floating_point]
    if config.secure_aggregation is not None and floating:
        expected = "a model without running statistics with [secure_aggregation], such as one with group norms"
        raise InvalidInput("task", expected, f"the buffers {', '.join(floating[:3])}")
