"""Evaluation on clients: a run that asks for it, and what is known of a round's model."""

from __future__ import annotations

ASKING = {"stop": {"rounds": 1}, "evaluation": {"clients_every": 1}}


def metrics(world, round_=0):
    """What is known of a round's model."""
    return world.coordinator.run("r").log.commits[round_].metrics
