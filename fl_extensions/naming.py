"""Resolves the name of code from outside: an entry point of an installed package, or `module:attribute`.

Nothing is imported here. A name from another machine is resolved with `listed`, the `module:attribute` names in this
machine's own configuration. Any other module is refused before its code runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import entry_points


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of code from outside."""

    noun: str
    """"task"."""
    group: str
    """Entry point group in which installed packages register such code."""
    example: str
    """A `module:attribute` for messages."""
    error: type[ValueError]
    """Raised for a name that cannot be resolved."""
    not_listed: type[ValueError]
    """Raised for a `module:attribute` that this machine's configuration does not list. Nothing was imported then."""
    built_in: Mapping[str, str] = field(default_factory=dict)
    """Names of built-in ones, with the `module:attribute` of each."""
    classes: bool = False
    """Whether it is written as a class. Otherwise it is a function."""

    @property
    def one(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"


def path_of(kind: Kind, name: str, listed: Collection[str] | None = None) -> str:
    """The `module:attribute` of a name.

    Args:
        kind: the kind of code.
        name: a built-in name, an entry point, or `module:attribute`.
        listed: the `module:attribute` names that may be loaded. None allows all, for a name from this machine's user.

    Raises:
        ValueError: of `kind.not_listed`: the name is not listed; of `kind.error`: it is unknown, or two packages
            register it.
    """
    if name in kind.built_in:
        return kind.built_in[name]
    built_in = f"a built-in {kind.noun} ({comma_separated(kind.built_in)})"
    if is_path(name):
        if listed is not None and name not in listed:
            raise kind.not_listed(
                f"expected {built_in}, an entry point of an installed package ({comma_separated(installed(kind))}) or a"
                f" listed one ({comma_separated(listed)}), got {name!r}"
            )
        return name
    if name in (paths := installed(kind)):
        return _only(kind, name, paths[name])
    expected, got = unknown(kind, name)
    raise kind.error(f"expected {expected}, got {got}")


def unknown(kind: Kind, name: str) -> tuple[str, str]:
    """What was expected in place of a name that is not known here, and what came, with a similar name."""
    points = installed(kind)
    close = get_close_matches(name, [*kind.built_in, *points], n=1)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    also = f", an installed one ({comma_separated(points)})" if points else ""
    built_in = f"a built-in {kind.noun} ({comma_separated(kind.built_in)})"
    return f"{built_in}{also} or your own as module:attribute, such as {kind.example}", f'"{name}".{hint}'


def is_known(kind: Kind, name: str) -> bool:
    """Whether a name is built in, of an installed package, or has the form module:attribute."""
    return name in kind.built_in or is_path(name) or name in installed(kind)


def installed(kind: Kind) -> dict[str, set[str]]:
    """The `module:attribute` paths that installed packages register, by name, in the order of the names."""
    points: dict[str, set[str]] = {}
    for point in sorted(entry_points(group=kind.group), key=lambda point: point.name):
        points.setdefault(point.name, set()).add(f"{point.module}:{point.attr}")
    return points


def is_path(name: str) -> bool:
    """Whether the name is `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def comma_separated(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"


def _only(kind: Kind, name: str, paths: set[str]) -> str:
    if len(paths) > 1:
        raise kind.error(
            f"{kind.noun} {name}: expected one installed package with an entry point of this name in {kind.group}, got"
            f" {comma_separated(sorted(paths))}: uninstall all but one of them"
        )
    return next(iter(paths))
