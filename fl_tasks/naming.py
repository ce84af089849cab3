"""Resolves the name of a task: a built-in task, an entry point of an installed package, or `module:attribute`.

Nothing is imported here. `fl_extensions.naming` has the rule for names from other machines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from fl_extensions import naming
from fl_extensions.naming import Kind
from fl_tasks.errors import TaskError

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "digits": "fl_tasks.built_in.digits:Digits",
        "fashion-mnist": "fl_tasks.built_in.vision:FashionMnist",
        "cifar10": "fl_tasks.built_in.vision:Cifar10",
        "cifar100": "fl_tasks.built_in.vision:Cifar100",
        "emnist": "fl_tasks.built_in.vision:Emnist",
        "emnist-digits": "fl_tasks.built_in.vision:EmnistDigits",
        "femnist": "fl_tasks.built_in.leaf:Femnist",
        "celeba": "fl_tasks.built_in.leaf:CelebA",
        "shakespeare": "fl_tasks.built_in.shakespeare:Shakespeare",
        "least-squares": "fl_tasks.built_in.least_squares:LeastSquares",
    }
)
"""Names of the built-in tasks, with the class of each."""

GROUP = "impetus.tasks"
"""Entry point group in which installed packages register tasks."""


class TaskNotListed(TaskError):
    """This machine's configuration does not list the `module:attribute`. Nothing was imported."""


TASKS = Kind(
    "task", GROUP, example="my_task:Wine", error=TaskError, not_listed=TaskNotListed, built_in=BUILT_IN, classes=True
)


def path_of(name: str, listed: Collection[str] | None = None) -> str:
    """The `module:attribute` of a name.

    Args:
        name: a built-in task, an entry point, or `module:attribute`.
        listed: the `module:attribute` names that may be loaded. None allows all, for a name from this machine's user.

    Raises:
        TaskNotListed: the name is not listed.
        TaskError: the name is unknown, or two packages register it.
    """
    return naming.path_of(TASKS, name, listed)
