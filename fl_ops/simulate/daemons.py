"""The clients of a replay as the daemons' own configuration files describe them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_client.config import ClientConfig, load_config
from fl_client.data import LocalTask, load_local_task
from fl_client.errors import StartError
from fl_client.identity import identity_of
from fl_ops.errors import Misused

CPU = torch.device("cpu")


class KeptShard:
    """A daemon's shard as its state directory keeps it, which may be in use; made anew where it is not at hand."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "shard.json"

    def shard(self, asked: dict[str, Any], make: Callable[[], list[int] | None]) -> list[int] | None:
        """Indices of the device's examples; None where the shard is not made of indices."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return make()
        indices: list[int] | None = kept["indices"] if kept.get("asked") == asked else make()
        return indices


def load_daemons(folder: Path, task_name: str) -> dict[str, LocalTask]:
    """Every client of the task whose TOML file is in a folder, by id. Raises Misused."""
    try:
        configs = [load_config(path) for path in sorted(folder.glob("*.toml"))]
        clients = {identity_of(config): _load(config) for config in configs if config.task.name == task_name}
    except StartError as error:
        raise Misused(f"--client-configs: {error}") from error
    if not clients:
        raise Misused(f"--client-configs: expected daemons' files *.toml with the task {task_name} in {folder}")
    return clients


def _load(config: ClientConfig) -> LocalTask:
    return load_local_task(config, KeptShard(config.state_dir), CPU)
