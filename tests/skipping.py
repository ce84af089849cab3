"""The settings that methods with random skipping need, for tests of all methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import algorithms as fl


def suited(content: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """A run's content; if its method skips at random, all `clients` are in every round, and no steps are ordered."""
    method = content["algorithm"]["name"]
    if method not in fl.names() or not fl.build(method).skipping:
        return dict(content)
    local = {key: value for key, value in content["local"].items() if key not in {"steps", "epochs"}}
    return {**content, "round": {**content["round"], "clients_per_round": clients, "quorum": clients}, "local": local}
