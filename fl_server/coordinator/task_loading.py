"""A run's task, loaded only where this coordinator's own configuration allows it.

Any caller of the admin port can create a run, and importing a module runs its code. So a run may name a built-in
task, an entry point of an installed package, or a `module:attribute` that server.toml lists, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_extensions.naming import installed
from fl_server.aggregation.outside_task.own_options import with_own
from fl_server.aggregation.outside_task.remote_task import RemoteTask, TaskProcesses
from fl_server.config import ServerConfig
from fl_server.errors import InvalidInput
from fl_server.run_config import TaskSection
from fl_server.services import Services
from fl_tasks import BUILT_IN, Task, TaskError, TaskNotListed, fingerprint, load_task
from fl_tasks.metrics import declared_directions
from fl_tasks.naming import TASKS, path_of


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A run's task, with the (version, source) that clients must have."""

    task: Task | RemoteTask
    fingerprint: tuple[str, str]
    directions: Mapping[str, bool]
    """Whether a lower value is better, for each metric whose direction the task declares."""


def load_allowed(section: TaskSection, config: ServerConfig, processes: TaskProcesses | None = None) -> LoadedTask:
    """The task of a run. processes: where one from outside runs; None: in this process.

    Raises InvalidInput for one that is not allowed, without importing anything, for an option that only server.toml may
    give, and for one that cannot be loaded.
    """
    listed, here = config.tasks, config.task_options.get(section.name, {})
    try:
        if processes is not None and _is_outside(section, config):
            remote = RemoteTask(processes, section.name, section.options, here)
            return LoadedTask(remote, remote.facts.fingerprint, remote.facts.directions)
        task = load_task(section.name, with_own(section.name, section.options, here, listed), listed)
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


def in_its_own_process(section: TaskSection, services: Services) -> bool:
    """Whether a run's task runs in a process of its own. Raises TaskNotListed."""
    return services.processes is not None and _is_outside(section, services.config)


def _is_outside(section: TaskSection, config: ServerConfig) -> bool:
    """Whether the task is of another module than ours, though it may have a built-in one as its base."""
    return not path_of(section.name, config.tasks).startswith("fl_tasks.")


def outside_tasks(config: ServerConfig) -> bool:
    """Whether a run may name a task from outside: a listed one, or one of an installed package."""
    return bool(config.tasks) or bool(installed(TASKS))


def not_loadable(error: TaskError) -> InvalidInput:
    """The error for the creator of a run when the task's own code failed."""
    return InvalidInput("task", "a task that this server can load", error)
