"""What a run's configuration is once an operator has given it more rounds or more time."""

from __future__ import annotations

import math

from fl_server.errors import InvalidInput
from fl_server.plain_values import MAX_COUNT, MAX_SECONDS
from fl_server.run_config import RunConfig
from fl_server.store.base import RunRecord


def extended(config: RunConfig, record: RunRecord, rounds: int, wall_time_s: float) -> RunConfig:
    """The configuration with so many rounds and seconds more. Raises InvalidInput for more than a run can have.

    The seconds count from the limit or, where the run has gone on beyond it, from what it has used.
    """
    if rounds > MAX_COUNT - config.stop.rounds:
        most = MAX_COUNT - config.stop.rounds
        raise InvalidInput("rounds", f"at most {most:,} more, for a run has {MAX_COUNT:,} at most", f"{rounds:,}")
    limit = config.stop.wall_time_s
    begun = max(limit, record.elapsed_s) if limit else 0.0
    if not (math.isfinite(wall_time_s) and 0 <= wall_time_s <= MAX_SECONDS - begun):
        raise InvalidInput("wall_time_s", f"0 to {MAX_SECONDS - begun:g} seconds more", wall_time_s)
    more = {"rounds": config.stop.rounds + rounds, "wall_time_s": begun + wall_time_s if limit else limit}
    return config.model_copy(update={"stop": config.stop.model_copy(update=more)})
