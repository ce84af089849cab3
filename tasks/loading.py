"""From a name in a configuration to a task: built-in, or `module:attribute` from what is installed here."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from tasks.base import Task, TaskError, task_code

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "digits": "tasks.digits:Digits",
        "fashion-mnist": "tasks.vision:FashionMnist",
        "cifar10": "tasks.vision:Cifar10",
        "cifar100": "tasks.vision:Cifar100",
        "emnist": "tasks.vision:Emnist",
        "emnist-digits": "tasks.vision:EmnistDigits",
    }
)
"""Names of the tasks that come along, with the class behind each."""

METHODS = tuple(name for name, member in vars(Task).items() if callable(member) and not name.startswith("_"))

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


def load_task(name: str, options: Mapping[str, object] = NO_OPTIONS) -> Task:
    """The task that a name stands for, made with `options` as keyword arguments.

    The attribute of `module:attribute` is a class or a factory (called with the options) or a finished task (which
    takes none). Modules of the current directory can be named too. Raises TaskError, with what to do; an exception of
    the task's own code is kept as its cause.
    """
    attribute = _attribute(_path(name), name)
    if not inspect.isclass(attribute) and not _missing(attribute):
        if options:
            raise TaskError(f"task {name} is a finished object and takes no options, got {_listed(options)}")
        return cast(Task, attribute)
    if not callable(attribute):
        raise _incomplete(name, attribute)
    task = _make(name, attribute, options)
    if _missing(task):
        raise _incomplete(name, task)
    return cast(Task, task)


def fingerprint(task: Task) -> tuple[str, str]:
    """(version, source): the author's version and "sha256:" + hex of the text of the module that defines the class.

    The same in every process and on every machine with the same text, however its lines end. Raises TaskError where
    there is no text to read, as for a class typed into an interpreter.
    """
    kind = type(task)
    try:
        path = None if kind.__module__ in sys.stdlib_module_names else inspect.getsourcefile(kind)
        text = Path(path).read_text(encoding="utf-8") if path else None
    except (TypeError, OSError):
        text = None
    if text is None:
        raise TaskError(
            f"the task's class {kind.__qualname__} of module {kind.__module__} has no source here; define it in a"
            " file of your own: devices and server compare the text of its module"
        )
    return task.version, "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _path(name: str) -> str:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if module and colon and attribute:
        return name
    close = get_close_matches(name, BUILT_IN, n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    raise TaskError(
        f"expected a built-in task ({_listed(BUILT_IN)}) or your own as module:attribute, such as my_task:Wine, got"
        f' "{name}".{hint}'
    )


def _attribute(path: str, name: str) -> object:
    module_name, _, attribute = path.partition(":")
    # Last, so that a file lying in the current directory replaces no installed module.
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        with task_code(f"importing {module_name} for task {name}"):
            module = importlib.import_module(module_name)
    except TaskError as error:
        cause = error.__cause__
        # Only when the module itself, or its package, is missing; a module that it imports is another matter.
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{module_name}.".startswith(f"{cause.name}."):
            raise TaskError(
                f"there is no module {module_name} for task {name}: install the package that has it into this Python"
                f" (pip install ...), or start in the folder where {module_name.split('.')[0]}.py lies"
            ) from cause
        raise
    if not hasattr(module, attribute):
        classes = [key for key, value in inspect.getmembers(module, inspect.isclass) if value.__module__ == module_name]
        raise TaskError(f"module {module_name} has no attribute {attribute}; its classes are {_listed(classes)}")
    return getattr(module, attribute)


def _make(name: str, factory: Callable[..., Any], options: Mapping[str, object]) -> object:
    with task_code(f"reading what {name} accepts"):
        signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise TaskError(
            f"task {name} does not take the options {_listed(options)}: {error}; it accepts"
            f" {_listed(signature.parameters)}"
        ) from error
    with task_code(f"making task {name} with options {dict(options)}"):
        return factory(**options)


def _missing(task: object) -> list[str]:
    methods = [method for method in METHODS if not callable(getattr(task, method, None))]
    return methods if isinstance(getattr(task, "version", None), str) else ["version", *methods]


def _incomplete(name: str, task: object) -> TaskError:
    return TaskError(
        f"task {name} is {type(task).__name__!r} without {_listed(_missing(task))}; a task has version, a string, and"
        f" the methods {_listed(METHODS)}. tasks.Classifier brings version, loss and metrics along"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
