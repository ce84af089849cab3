"""The metrics of a task: their names, and whether a lower value is better.

`Task.metrics` returns values by name. A task that has a metric with a name of its own also says in which direction it
improves:

    class Prices:
        declared_metrics = (Metric("off_by_cents", lower_is_better=True),)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.errors import TaskError, task_code

MAX_METRICS, NAME_CHARS = 64, 64
"""Limits of an evaluation: metrics, and characters of a name."""
RESERVED_PREFIX, RESERVED_ENDING = "clients_", "_without_personal"
"""The project's own names begin or end so."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a task."""

    name: str
    lower_is_better: bool | None = None
    """None: the direction is that of the project's table of well-known names, or the run's file states it."""


def wrong_name(name: object) -> str | None:
    """The rule that a metric's name breaks, as "names of ..."; None if it breaks none.

    A name becomes a column of tables, a label of Prometheus, a key of MLflow and a path of TensorBoard.
    """
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= NAME_CHARS:
        return f"names of 1 to {NAME_CHARS} printable characters"
    if name != name.strip():
        return "names without spaces at their ends"
    if any(part in {"", ".", ".."} for part in name.split("/")):
        return 'names whose parts between slashes are not empty, "." or ".."'
    return None


def checked_names(names: Sequence[object], what: str) -> None:
    """Raises TaskError for a name that is not valid. what: where the names come from, for the message."""
    if len(names) > MAX_METRICS:
        raise TaskError(f"{what}: expected at most {MAX_METRICS} metrics, got {len(names)}")
    for name in names:
        rule = wrong_name(name)
        if rule is None and (str(name).startswith(RESERVED_PREFIX) or str(name).endswith(RESERVED_ENDING)):
            rule = f'names that do not begin with "{RESERVED_PREFIX}" or end with "{RESERVED_ENDING}"'
        if rule is not None:
            raise TaskError(f"{what}: expected {rule}, got {_shown(name)}")


def declared_metrics(task: object) -> tuple[Metric, ...]:
    """The metrics that a task declares; empty if it declares none. Raises TaskError if they are not valid."""
    with task_code("the task's declared_metrics"):
        found = getattr(task, "declared_metrics", ())
    if not isinstance(found, Sequence) or not all(isinstance(each, Metric) for each in found):
        raise TaskError(
            "expected the task's declared_metrics as a list or tuple of tasks.Metric, as in"
            f' declared_metrics = (Metric("mae", lower_is_better=True),), got {_shown(found)}'
        )
    names = [each.name for each in found]
    checked_names(names, "the task's declared_metrics")
    if twice := [name for name in names if names.count(name) > 1]:
        raise TaskError(f"the task's declared_metrics: expected each metric once, got {twice[0]!r} twice")
    return tuple(found)


def declared_directions(task: object) -> Mapping[str, bool]:
    """Whether a lower value is better, for each metric whose direction the task declares. Raises TaskError."""
    return {each.name: each.lower_is_better for each in declared_metrics(task) if each.lower_is_better is not None}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
