"""Helpers for runs whose clients evaluate the model."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fl_server.harness import World

WITH_CLIENT_EVALUATION = {"stop": {"rounds": 1}, "evaluation": {"clients_every": 1}}


def round_metrics(world: World, round_: int = 0) -> Mapping[str, float]:
    """The metrics of a committed round of run "r"."""
    return world.coordinator.run("r").rounds.recent[round_].metrics
