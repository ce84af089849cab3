"""Resolves the name of a task: a built-in task, an entry point of an installed package, or `module:attribute`.

Nothing is imported here. A name from another machine is resolved with `listed`, the `module:attribute` names in this
machine's own configuration. Any other module is refused before its code runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import MappingProxyType

from tasks.base import TaskError

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "digits": "tasks.built_in.digits:Digits",
        "fashion-mnist": "tasks.built_in.vision:FashionMnist",
        "cifar10": "tasks.built_in.vision:Cifar10",
        "cifar100": "tasks.built_in.vision:Cifar100",
        "emnist": "tasks.built_in.vision:Emnist",
        "emnist-digits": "tasks.built_in.vision:EmnistDigits",
        "shakespeare": "tasks.built_in.shakespeare:Shakespeare",
    }
)
"""Names of the built-in tasks, with the class of each."""

GROUP = "impetus.tasks"
"""Entry point group in which installed packages register tasks."""


class TaskNotListed(TaskError):
    """This machine's configuration does not list the `module:attribute`. Nothing was imported."""


def path_of(name: str, listed: Collection[str] | None = None) -> str:
    """The `module:attribute` of a name.

    Args:
        name: a built-in task, an entry point, or `module:attribute`.
        listed: the `module:attribute` names that may be loaded. None allows all, for a name from this machine's user.

    Raises:
        TaskNotListed: the name is not listed.
        TaskError: the name is unknown, or two packages register it.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if is_path(name):
        if listed is not None and name not in listed:
            raise TaskNotListed(
                f"expected a built-in task ({comma_separated(BUILT_IN)}), an entry point of an installed package"
                f" ({comma_separated(_entry_points())}) or a listed one ({comma_separated(listed)}), got {name!r}"
            )
        return name
    found = _entry_points()
    if name in found:
        return _only(name, found[name])
    close = get_close_matches(name, [*BUILT_IN, *found], n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    installed = f", an installed one ({comma_separated(found)})" if found else ""
    raise TaskError(
        f"expected a built-in task ({comma_separated(BUILT_IN)}){installed} or your own as module:attribute, such as"
        f' my_task:Wine, got "{name}".{hint}'
    )


def is_path(name: str) -> bool:
    """Whether the name is `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def comma_separated(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"


def _entry_points() -> dict[str, set[str]]:
    """The `module:attribute` paths that installed packages register, by name."""
    found: dict[str, set[str]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        found.setdefault(point.name, set()).add(f"{point.module}:{point.attr}")
    return found


def _only(name: str, paths: set[str]) -> str:
    if len(paths) > 1:
        raise TaskError(
            f"task {name}: expected one installed package with an entry point of this name in {GROUP}, got"
            f" {comma_separated(sorted(paths))}: uninstall all but one of them"
        )
    return next(iter(paths))
