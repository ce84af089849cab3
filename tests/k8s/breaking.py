"""Valid manifests with one fault, for the tests of the checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from tests.k8s.checks import CHECKS
from tests.k8s.manifests import EVERYTHING, build
from tests.k8s.objects import Object, title

GONE = object()
"""In place of a value: remove the key."""

SERVER, CLIENT = "StatefulSet/fl-server", "DaemonSet/fl-client"
POD = "spec template spec"
CONTAINER = f"{POD} containers 0"
SETTINGS, NODES = "ConfigMap/fl-server-settings-", "ConfigMap/fl-client-nodes-"
COMMON = "ConfigMap/fl-client-settings-"
NAME = "app.kubernetes.io/name"

Case = tuple[Callable[..., Any], str, str, Any, str]
"""A check; the object's title or its beginning; the path to a key; the new value; a part of the problem's text."""


def swap(old: str, new: str) -> Callable[[str], str]:
    """A function that replaces text."""

    def swapped(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return swapped


def cases(bad: Sequence[Case]) -> pytest.MarkDecorator:
    """Parameters of a test, named after what they are."""
    return pytest.mark.parametrize(
        ("check", "name", "path", "value", "words"), bad, ids=[f"{check.__name__}-{words}" for check, *_, words in bad]
    )


def broken(name: str, path: str, value: Any) -> list[Object]:
    """All objects, with one key changed: by a value, by a function of the old one, or gone.

    A step of the path is a key, a number, or "=name" for the item of a list that has the name.
    """
    objects = build(EVERYTHING)
    at: Any = next(
        candidate
        for candidate in objects
        if title(candidate) == name or (name[-1] in "-/" and title(candidate).startswith(name))
    )
    *way, last = path.split()
    for step in way:
        at = at[_key(at, step)]
    key = _key(at, last)
    if value is GONE:
        del at[key]
    else:
        at[key] = value(at[key]) if callable(value) else value
    return objects


def _is(found: str, name: str) -> bool:
    return found.startswith(name) if name[-1] in "-/" else found == name


def _key(at: Any, step: str) -> Any:
    if step.startswith("="):
        return next(number for number, element in enumerate(at) if element["name"] == step[1:])
    return int(step) if step.isdigit() else step


def assert_sees(check: Callable[..., Any], objects: Sequence[Object], words: str) -> None:
    """Check that the problem of broken manifests has this text. test_manifests.py tests that valid ones have none."""
    found = list(check(objects))
    assert [problem for problem in found if words in problem], found


def of_module(module: ModuleType) -> set[Callable[..., Any]]:
    """The checks of a module."""
    return {check for check in CHECKS if inspect.getmodule(check) is module}
