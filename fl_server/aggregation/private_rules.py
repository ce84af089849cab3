"""What runs with differential privacy exclude: settings, methods and models for which no bound is known.

Client-level privacy comes first, then privacy of records: the noise must cover all that clients send.
"""

from __future__ import annotations

from fractions import Fraction

import algorithms as fl
from algorithms.privacy.dp_sgd import conflict
from algorithms.reference import has_reference
from fl_server.aggregation.private_sum import clip_rule
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.privacy import PrivacySection, SecureAggregationSection
from protos.layout import Layout

_STATISTICS = "num_batches_tracked"
"""The buffer that every batch norm of torch has."""
_OTHERS = "whether a client takes part and counts must not depend on the others"


def check_privacy(config: RunConfig) -> None:
    """Raises InvalidInput for a setting with which a run would not keep its promise, or no bound of it is known."""
    round_, privacy = config.round, config.client_privacy
    if privacy is None:
        return
    of_server = config.local.optimizer is not None and config.local.optimizer.state == "server"
    secure = config.secure_aggregation
    sampling, why_sampling = ("bernoulli", _OTHERS) if secure is None else ("fixed", "its keys are of one cohort")
    wanted: list[tuple[str, object, object, str]] = [
        ("round.reducer", round_.reducer, "mean", "the noise is for a sum"),
        ("round.sampling", round_.sampling, sampling, why_sampling),
        ("round.close", round_.close, "cohort", _OTHERS),
        ("round.quorum", round_.quorum, None, _OTHERS),
        ("round.min_accepted", round_.min_accepted, None, _OTHERS),
        ("round.max_relative_norm", round_.max_relative_norm, 0.0, _OTHERS),
        ("round.max_relative_payload", round_.max_relative_payload, 0.0, _OTHERS),
        ("round.max_client_share", round_.max_client_share, 0.0, "all clients weigh the same"),
        ("round.clip_update_norm", round_.clip_update_norm, 0.0, "privacy.clip takes its place"),
        ("evaluation.clients_every", config.evaluation.clients_every, 0, "the metrics of clients have no noise"),
        ("encodings.update", config.encodings.update, "plain", "a decoded update may be longer than the clip"),
    ]
    for field, came, right, why in wanted:
        if came != right:
            raise InvalidInput(field, f"{'none' if right is None else repr(right)} with [privacy]: {why}", came)
    if secure is not None:
        _check_with_sums(privacy, secure)
    if of_server:
        raise InvalidInput("local.optimizer.state", '"fresh" or "device" with [privacy]', "server")
    if not config.population:
        raise InvalidInput("population", "N, the clients that the run may ever draw from, with [privacy]", 0)
    if privacy.delta * config.population > 1:
        most = f"at most 1 / population, {1 / config.population:.3g}"
        raise InvalidInput("privacy.delta", most, f"{privacy.delta:g}")
    clip_rule(config)


def _check_with_sums(privacy: PrivacySection, secure: SecureAggregationSection) -> None:
    """Raises InvalidInput for a setting of privacy that secure aggregation excludes, or has twice."""
    if privacy.clip_quantile is not None:
        expected = "none with [secure_aggregation]: nobody sees which updates are clipped"
        raise InvalidInput("privacy.clip_quantile", expected, privacy.clip_quantile)
    if privacy.clip != secure.clip:
        raise InvalidInput("secure_aggregation.clip", f"privacy.clip, {privacy.clip:g}: devices clip once", secure.clip)


def check_one_release(config: RunConfig, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput unless all sums of the method are multiples of the clients' mean delta, which gets noise."""
    name, [first, *more] = algorithm.name, algorithm.exchanges
    if more or first.payloads != ("delta",) or algorithm.keeps_client_state:
        why = "whose clients send their delta alone, with [privacy]: other payloads and states would need noise too"
        raise InvalidInput("algorithm.name", f"a method {why}", name)
    if len({shares_of(algorithm, examples, 1) for examples in (1, 7)}) > 1 or algorithm.objective != "uniform":
        expected = '"uniform" with [privacy]: a weight by examples tells of them'
        raise InvalidInput("algorithm.parameters.weights", expected, "examples")
    if config.local.steps is None and len({shares_of(algorithm, 1, steps) for steps in (1, 7)}) > 1:
        expected = f"a number of steps with [privacy]: {name} divides an update by its steps, which epochs make secret"
        raise InvalidInput("local.steps", expected, "none")


def check_private_model(config: RunConfig, layout: Layout) -> None:
    """Raises InvalidInput for running statistics in a private run: they are means over clients, without noise.

    Clients refuse batch norm with privacy of records.
    """
    names = [entry.name for entry in layout.entries if entry.name.rpartition(".")[2] == _STATISTICS]
    if config.record_privacy is not None and names:
        raise InvalidInput(
            "task",
            "a model without batch norm with [privacy], because the gradient of each example is clipped alone: use"
            " torch.nn.GroupNorm",
            f"batch norm at {names[0].rpartition('.')[0] or 'the model itself'!r}",
        )
    floating = [entry.name for entry in layout.entries if not entry.trainable and entry.dtype.is_floating_point]
    if config.client_privacy is not None and floating:
        expected = "a model without running statistics with [privacy], such as one with group norms"
        raise InvalidInput("task", expected, f"the buffers {', '.join(floating[:3])}")


def has_centre(config: RunConfig, algorithm: fl.Algorithm) -> bool:
    """Whether a public part of the deltas is taken away before they are clipped: the steps along the direction."""
    plain = config.local.optimizer is None and config.local.steps is not None
    alone = config.secure_aggregation is None  # in a masked sum nobody could leave it out for others
    return config.client_privacy is not None and alone and plain and has_reference(algorithm)


def shares_of(algorithm: fl.Algorithm, examples: int, steps: int) -> tuple[tuple[str, fl.Payload, float], ...]:
    """Name, payload and coefficient of one of two clients in each sum. The other one has one example and one step."""
    cohort = [fl.UpdateInfo("a", examples, steps), fl.UpdateInfo("b", 1, 1)]
    sums = algorithm.exchanges[0].sums(cohort, fl.RoundInfo(0, 0.1, rounds=1, population=2, cohort_size=2))
    return tuple((name, row.payload, row.coefficients[0]) for name, row in sums.items())


def check_record_privacy(config: RunConfig, algorithm: fl.Algorithm) -> None:
    """Raises InvalidInput, with the reason, for a run whose clients would send more than private steps."""
    if why := conflict(algorithm):
        raise InvalidInput(
            "algorithm.name",
            "a method whose steps can be made private, such as fedavg or fedcm, with [privacy]",
            f"{algorithm.name}: {why}",
        )
    one, many = algorithm.weights([fl.UpdateInfo("a", 1, 1), fl.UpdateInfo("b", 3, 1)])
    if Fraction(one) != Fraction(many) or algorithm.objective != "uniform":
        raise InvalidInput(
            "algorithm.parameters",
            'weights = "uniform" and objective = "uniform" with [privacy], for clients send no example counts',
            "weights by examples",
        )
    refused = {
        "personal": (bool(config.personal), "none with [privacy]: personal parts are trained without noise"),
        "local.continue_data": (
            config.local.continue_data,
            "false with [privacy], whose steps draw each example by itself",
        ),
        "local.max_gradient_norm": (
            bool(config.local.max_gradient_norm),
            "0 with [privacy], whose clip limits the gradient of each example",
        ),
        "evaluation.clients_every": (
            bool(config.evaluation.clients_every),
            "0 with [privacy]: what clients measure on their held-out examples has no noise",
        ),
    }
    for field, (given, expected) in refused.items():
        if given:
            raise InvalidInput(field, expected, "one that is set")
