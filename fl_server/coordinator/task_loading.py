"""A run's task, loaded only where this coordinator's own configuration allows it.

Any caller of the admin port can create a run, and importing a module runs its code. So a run may name a built-in
task, an entry point of an installed package, or a `module:attribute` that server.toml lists, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_server.config import ServerConfig
from fl_server.errors import InvalidInput
from fl_server.run_config import TaskSection
from tasks import BUILT_IN, Task, TaskError, TaskNotListed, fingerprint, load_task, own_options
from tasks.metrics import declared_directions


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A run's task, with the (version, source) that clients must have."""

    task: Task
    fingerprint: tuple[str, str]
    directions: Mapping[str, bool]
    """Whether a lower value is better, for each metric whose direction the task declares."""


def load_allowed(section: TaskSection, config: ServerConfig) -> LoadedTask:
    """The task of a run.

    Raises InvalidInput for one that is not allowed, without importing anything, for an option that only server.toml may
    give, and for one that cannot be loaded.
    """
    listed, here = config.tasks, config.task_options.get(section.name, {})
    try:
        foreign = (own_options(section.name, listed) | here.keys()) & section.options.keys()
        if foreign:
            raise _not_from_a_run(section, min(foreign))
        task = load_task(section.name, {**section.options, **here}, listed)
        return LoadedTask(task, fingerprint(task), declared_directions(task))
    except TaskNotListed as error:
        raise InvalidInput(
            "task.name",
            f"a task that this coordinator may load: built in ({', '.join(BUILT_IN)}), an entry point of an installed"
            f" package, or listed under `tasks` in its server.toml ({', '.join(listed) or 'none is'})",
            section.name,
        ) from error
    except TaskError as error:
        raise not_loadable(error) from error


def _not_from_a_run(section: TaskSection, option: str) -> InvalidInput:
    return InvalidInput(
        f"task.options.{option}",
        f"no value in a run: each machine has its own. On the coordinator set it in server.toml, [task_options]"
        f" {section.name!r} = {{ {option} = ... }}; on a device in client.toml",
        section.options[option],
    )


def not_loadable(error: TaskError) -> InvalidInput:
    """The error for the creator of a run when the task's own code failed."""
    return InvalidInput("task", "a task that this server can load", error)
