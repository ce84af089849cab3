"""The clients of a replay from the files of daemons on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fl_client.errors import StartError
from fl_client.settings.config import ClientConfig, load_config
from fl_client.settings.identity import identity_of
from fl_client.storage.state import shard_file
from fl_client.training.data import LocalTask, load_local_task
from fl_common.settings import parse_json
from fl_ops.errors import UsageError
from fl_ops.simulate.clients import CPU


def load_daemons(folder: Path, task_name: str) -> dict[str, LocalTask]:
    """All clients of a task, by id, from the daemons' TOML files in a folder. Raises UsageError."""
    try:
        configs = [load_config(path) for path in sorted(folder.glob("*.toml"))]
        clients = {identity_of(config): _load(config, number) for config, number in _serving(configs, task_name)}
    except StartError as error:
        raise UsageError(f"--client-configs: {error}") from error
    if not clients:
        raise UsageError(f"--client-configs: expected daemons' files *.toml with the task {task_name} in {folder}")
    return clients


def _serving(configs: Iterable[ClientConfig], task_name: str) -> Iterator[tuple[ClientConfig, int]]:
    """The settings of daemons with the task, each with the number of the task. Raises UsageError where it has two."""
    for config in configs:
        numbers = [number for number, served in enumerate(config.served) if served.name == task_name]
        if len(numbers) > 1:
            raise UsageError(
                f"--client-configs: expected the task {task_name} once for {identity_of(config)}, got it with"
                f" {len(numbers)} data: leave the others out of a copy of its file"
            )
        yield from ((config, number) for number in numbers)


def _load(config: ClientConfig, number: int) -> LocalTask:
    return load_local_task(config, _StoredShard(config.state_dir), CPU, number)


class _StoredShard:
    """Reads the shard that a daemon stored in its state directory; computes it if there is none.

    It writes nothing: the daemon may be running.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def shard(self, asked: dict[str, Any], make: Callable[[], list[int] | None], title: str = "") -> list[int] | None:
        """Indices of the device's examples; None if the shard is not made of indices."""
        try:
            stored = parse_json((self._folder / shard_file(title)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return make()
        indices: list[int] | None = stored["indices"] if stored.get("asked") == asked else make()
        return indices
