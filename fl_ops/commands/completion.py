"""Completion in a shell: names of runs and clients from the coordinator, and names of tasks and methods.

A shell waits for the answer at each press of the Tab key, so there is little time, and no error is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib.metadata import entry_points

import typer

from fl_common.built_in import METHODS, TASKS
from fl_ops.admin import settings
from fl_ops.admin.client import AdminClient

SECONDS = 2.0
"""Longest time for the coordinator's answer."""


def run_names(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of runs, the newest first."""
    return _from_coordinator(
        context, incomplete, lambda client: [run.run_id for run in reversed(list(client.runs.list_runs()))]
    )


def client_names(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of clients."""
    return _from_coordinator(
        context, incomplete, lambda client: [row.client_id for row in client.clients.list_clients()]
    )


def task_names(incomplete: str) -> list[str]:
    """Names of the built-in tasks and of those that installed packages register."""
    return [name for name in (*TASKS, *_installed("impetus.tasks")) if name.startswith(incomplete)]


def method_names(incomplete: str) -> list[str]:
    """Names of the built-in methods and of those that installed packages register."""
    return [name for name in (*METHODS, *_installed("impetus.algorithms")) if name.startswith(incomplete)]


def _installed(group: str) -> list[str]:
    return sorted({point.name for point in entry_points(group=group)})


def _from_coordinator(
    context: typer.Context, incomplete: str, names: Callable[[AdminClient], Iterable[str]]
) -> list[str]:
    """The names that begin so; none if they cannot be had in time."""
    given = {field.name: context.params.get(field.name) for field in fields(settings.Layer)}
    try:
        with AdminClient(settings.load(settings.Layer(**given)), SECONDS) as client:
            return [name for name in names(client) if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - the operator is typing: the command itself will report what is wrong
        return []
