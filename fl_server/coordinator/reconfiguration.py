"""A run's configuration after an operator has extended or resumed it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fl_server.errors import InvalidInput
from fl_server.plain_values import MAX_COUNT, MAX_SECONDS
from fl_server.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """The configuration that a run continues with, and its line of history."""

    config: RunConfig
    event: str
    detail: str


def extended(config: RunConfig, elapsed_s: float, rounds: int, wall_time_s: float) -> RunConfig:
    """The configuration with so many more rounds and seconds. Raises InvalidInput for more than a run can have.

    The seconds are added to the limit or, if the run went on beyond it, to the time that it has used.
    """
    if rounds > MAX_COUNT - config.stop.rounds:
        most = MAX_COUNT - config.stop.rounds
        raise InvalidInput("rounds", f"at most {most:,} more, for a run has {MAX_COUNT:,} at most", f"{rounds:,}")
    limit = config.stop.wall_time_s
    used = max(limit, elapsed_s) if limit else 0.0
    if not (math.isfinite(wall_time_s) and 0 <= wall_time_s <= MAX_SECONDS - used):
        raise InvalidInput("wall_time_s", f"0 to {MAX_SECONDS - used:g} seconds more", wall_time_s)
    more = {"rounds": config.stop.rounds + rounds, "wall_time_s": used + wall_time_s if limit else limit}
    return config.model_copy(update={"stop": config.stop.model_copy(update=more)})


def resumed(config: RunConfig, round_: int, learning_rate: float) -> Reconfiguration:
    """The configuration of a failed run that continues from a round on. learning_rate: 0 to leave it as it is."""
    if not learning_rate:
        return Reconfiguration(config, "run_resumed", f"from round {round_} on")
    local = config.local.with_rate(learning_rate, round_)
    detail = f"from round {round_} on, with learning rate {learning_rate:g}"
    return Reconfiguration(config.model_copy(update={"local": local}), "run_resumed", detail)
