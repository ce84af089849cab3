"""`dataclasses.replace` for the core's values, faster: lives of depth 1 spend much of their time in it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _copier(kind: type) -> Callable[[Any], Any]:
    """A function that copies a value of a frozen class with slots into one whose fields can still be set."""
    plain = {"__slots__": (), "__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    opened = type(kind.__name__, (kind,), plain)
    lines = [f"    made.{field.name} = value.{field.name}" for field in dataclasses.fields(kind)]
    names: dict[str, Any] = {"new": object.__new__, "opened": opened}
    code = "\n".join(["def copied(value):", "    made = new(opened)", *lines, "    return made"])
    exec(code, names)  # noqa: S102 - as dataclasses does
    copied: Callable[[Any], Any] = names["copied"]
    return copied


def replaced(value: T, /, **changes: Any) -> T:
    """As `dataclasses.replace`. The value has slots, and all of its fields are arguments."""
    kind = type(value)
    made = _copier(kind)(value)  # type: ignore[arg-type]  # a class is hashable
    for name, new in changes.items():
        setattr(made, name, new)
    made.__class__ = kind
    made.__post_init__()  # a RoundState has it
    result: T = made
    return result


def _either(value: Any, /, **changes: Any) -> Any:
    return (replaced if type(value).__name__ == "RoundState" else dataclasses.replace)(value, **changes)


def install() -> None:
    """Let the modules of the core that are loaded use it for their states."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fl_server.rounds.") and getattr(module, "replace", None) is dataclasses.replace:
            module.replace = _either  # type: ignore[attr-defined]  # it has the name
