"""What a run with differential privacy may have: everything that clients send must be covered by the noise."""

from __future__ import annotations

from fractions import Fraction

import algorithms as fl
from algorithms.privacy.dp_sgd import conflict
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from protos.layout import Layout

_STATISTICS = "num_batches_tracked"
"""The buffer that every batch norm of torch has."""


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


def check_record_model(config: RunConfig, layout: Layout) -> None:
    """Raises InvalidInput if the model of a run with privacy has batch norm, which clients would refuse."""
    if config.record_privacy is None:
        return
    names = [entry.name for entry in layout.entries if entry.name.rpartition(".")[2] == _STATISTICS]
    if names:
        raise InvalidInput(
            "task",
            "a model without batch norm with [privacy], because the gradient of each example is clipped alone: use"
            " torch.nn.GroupNorm",
            f"batch norm at {names[0].rpartition('.')[0] or 'the model itself'!r}",
        )
