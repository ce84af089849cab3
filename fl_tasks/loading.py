"""Loads a task by name. Its attribute is checked to be a task before it is called."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast, get_type_hints

from fl_extensions.importing import attribute_of, source_digest
from fl_extensions.naming import comma_separated
from fl_tasks.base import Classifier, Task, TaskError
from fl_tasks.data.labels import class_names
from fl_tasks.errors import task_call, task_code
from fl_tasks.naming import TASKS, path_of

METHODS = tuple(name for name, member in vars(Task).items() if callable(member) and not name.startswith("_"))

_PATH = re.compile(r"\bPath\b")

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


def load_task(name: str, options: Mapping[str, object] = NO_OPTIONS, listed: Collection[str] | None = None) -> Task:
    """Load the task with this name, made with `options` as keyword arguments.

    The attribute of `module:attribute` must be a class with a task's members, a function annotated to return such a
    class, or a task object, which takes no options. Anything else is refused and never called. The module may also lie
    in the current directory.

    Args:
        name: a built-in task, an entry point of the group "impetus.tasks", or `module:attribute`.
        options: the task's options.
        listed: the `module:attribute` names that may be loaded, for a name from another machine. None allows all, for a
            name from this machine's user or configuration.

    Raises:
        TaskNotListed: the name is not listed. Nothing was imported.
        TaskError: the task cannot be loaded. An exception of the task's own code is its cause.
    """
    attribute = attribute_of(TASKS, path_of(name, listed), name)
    with task_code(f"reading the members of task {name}"):
        return _task_of(name, attribute, options)


def _task_of(name: str, attribute: object, options: Mapping[str, object]) -> Task:
    if inspect.isclass(attribute):
        if _class_lacks(attribute):
            raise _incomplete(name, attribute)
    elif inspect.isfunction(attribute):
        _require_task_returned(name, attribute)
    elif _lacks(attribute):
        raise _incomplete(name, attribute)
    elif options:
        raise TaskError(f"task {name} is a finished object and takes no options, got {comma_separated(options)}")
    else:
        return cast(Task, attribute)
    task = _make(name, attribute, options)
    if _lacks(task):
        raise _incomplete(name, task)
    return cast(Task, task)


def own_options(name: str, listed: Collection[str] | None = None) -> frozenset[str]:
    """The options of a task that only the settings of the machine itself may give, because they name its files.

    A class or a function declares them as `own_options = ("backbone",)`; each parameter that is annotated as a Path is
    one as well. The task is not made. Raises as `load_task`.
    """
    attribute = attribute_of(TASKS, path_of(name, listed), name)
    with task_code(f"reading what {name} accepts"):
        declared = getattr(attribute, "own_options", ())
        parameters = inspect.signature(attribute).parameters.values() if callable(attribute) else ()
    if isinstance(declared, str) or not all(isinstance(name, str) for name in declared):
        raise TaskError(f'task {name}: expected own_options to be names of options, as ("backbone",), got {declared!r}')
    return frozenset(declared) | {parameter.name for parameter in parameters if _PATH.search(_annotation(parameter))}


def _annotation(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", repr(annotation))


def load_function(name: str) -> Callable[..., Any]:
    """The function `module:function` that this machine's own configuration names. Raises TaskError.

    The module may also lie in the current directory. A name from another machine must never come here.
    """
    function = attribute_of(replace(TASKS, noun="function", classes=False), name, name)
    if not callable(function):
        raise TaskError(f"expected a function at {name}, got {type(function).__name__}")
    return function


def fingerprint(task: Task) -> tuple[str, str]:
    """(version, source): the author's version and "sha256:" + hex of the text of the module that defines the class.

    The version of a task that names its classes has their number and a digest of the names in their order.
    It is the same in every process and on every machine with the same text, with any line endings. Raises TaskError if
    the text cannot be read, as for a class defined in an interpreter.
    """
    kind = type(task)
    digest = source_digest(kind)
    if digest is None:
        raise TaskError(
            f"the task's class {kind.__qualname__} of module {kind.__module__} has no source here; define it in a"
            " file of your own: devices and server compare the text of its module"
        )
    with task_code("reading the task's version"):
        version = task.version
    if classes := class_names(task):
        named = hashlib.sha256("\n".join(classes).encode()).hexdigest()[:8]
        version = f"{version}, {len(classes)} classes {named}"
    return version, f"sha256:{digest}"


def _make(name: str, factory: Callable[..., Any], options: Mapping[str, object]) -> object:
    with task_code(f"reading what {name} accepts"):
        signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise TaskError(
            f"task {name} does not take the options {comma_separated(options)}: {error}; it accepts"
            f" {comma_separated(signature.parameters)}"
        ) from error
    with task_call(f"making task {name} with options {dict(options)}"):
        return factory(**options)


def _require_task_returned(name: str, function: Callable[..., Any]) -> None:
    """Raises TaskError unless the function is annotated to return a task. Other functions are never called."""
    with task_code(f"reading what {name} returns"):
        made = get_type_hints(function).get("return")
    if made is Task or (inspect.isclass(made) and (issubclass(made, Classifier) or not _class_lacks(made))):
        return
    shown = "none" if made is None else getattr(made, "__name__", repr(made))
    raise TaskError(
        f"task {name} is a function that is not annotated to return a task, so it was not called: expected a class"
        f" or a function annotated to return one, as in def wine(hidden: int = 16) -> Wine; got the annotation {shown}"
    )


def _class_lacks(kind: type) -> list[str]:
    """The members that a class lacks as a task, without making one. `version` may be a property."""
    methods = _methods_missing(kind)
    has_version = isinstance(getattr(kind, "version", None), str | property)
    return methods if has_version else ["version", *methods]


def _lacks(task: object) -> list[str]:
    methods = _methods_missing(task)
    return methods if isinstance(getattr(task, "version", None), str) else ["version", *methods]


def _methods_missing(holder: object) -> list[str]:
    return [method for method in METHODS if not callable(getattr(holder, method, None))]


def _incomplete(name: str, loaded: object) -> TaskError:
    kind, lacks = (
        (loaded.__name__, _class_lacks(loaded)) if isinstance(loaded, type) else (type(loaded).__name__, _lacks(loaded))
    )
    return TaskError(
        f"task {name} is {kind!r} without {comma_separated(lacks)}; a task's class has version, a string, and the"
        f" methods {comma_separated(METHODS)}. fl_tasks.Classifier brings version, loss and metrics along"
    )
