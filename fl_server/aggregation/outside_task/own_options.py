"""The options of a task that name files: server.toml gives them, and a run must not."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fl_server.errors import InvalidInput
from fl_tasks import own_options


def with_own(
    name: str, options: Mapping[str, object], here: Mapping[str, object], listed: Collection[str]
) -> dict[str, object]:
    """A run's options of a task, with those of server.toml. The task's module is imported.

    here: of `task_options`. listed: as for `load_task`. Raises InvalidInput for an option that a run must not give;
    TaskError for a task that cannot be loaded.
    """
    foreign = (own_options(name, listed) | here.keys()) & options.keys()
    if foreign:
        option = min(foreign)
        raise InvalidInput(
            f"task.options.{option}",
            f"no value in a run: each machine has its own. On the coordinator set it in server.toml, [task_options]"
            f" {name!r} = {{ {option} = ... }}; on a device in client.toml",
            options[option],
        )
    return {**options, **here}
