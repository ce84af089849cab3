"""Compares the sizes of a run with the coordinator's limits, when the run is created."""

from __future__ import annotations

from fl_common.units import size
from fl_server.aggregation.engine import Engine
from fl_server.errors import InvalidInput


def check_update_size(engine: Engine, max_update_mib: int) -> None:
    """Raises InvalidInput for a run with updates that no client could deliver."""
    largest = max(engine.shape(number).size_bytes for number in range(len(engine.algorithm.exchanges)))
    if largest > max_update_mib << 20:
        raise InvalidInput(
            "task",
            f"a model whose updates have at most {max_update_mib} MiB (limits.max_update_mib in server.toml)",
            f"{size(largest)}: raise the limit, or choose a smaller encodings.update",
        )
