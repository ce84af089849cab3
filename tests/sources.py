"""The modules of the product, read from the source: their syntax trees and imports.

An import inside a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

SHARED = ("protos", "fl_common", "algorithms", "fl_extensions", "fl_tasks")
"""Packages that import no program of ours."""

MAY_IMPORT: Mapping[str, set[str]] = {
    "protos": set[str](),
    "fl_common": set[str](),
    "algorithms": set[str](),
    "fl_extensions": {"algorithms"},
    "fl_tasks": {"algorithms", "fl_extensions"},
    "fl_server": {*SHARED},
    "fl_client": {*SHARED},
    "fl_web": {"protos", "fl_common"},
    "fl_ops": {*SHARED, "fl_server", "fl_client", "fl_web"},
    "benchmarks": {*SHARED, "fl_server", "fl_client", "fl_ops", "fl_web"},
}
"""Package -> other packages that it may import."""


def module_name(path: Path) -> str:
    """Full dotted name of the module in a file; a package's is its `__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> Mapping[str, ast.Module]:
    """Every module that is not generated -> its syntax tree. Read once, and only by the worker that needs it."""
    paths = (path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py")))
    gc.disable()  # a million nodes stay, and a search for garbage among them costs more than the parsing
    try:
        return {module_name(path): ast.parse(path.read_text()) for path in paths if "_pb2" not in path.name}
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(module: str) -> Sequence[ast.AST]:
    """Every node of a module's syntax tree. Most rules read them, and a walk costs more than a rule."""
    return list(ast.walk(sources()[module]))


@cache
def imports(module: str) -> Sequence[tuple[str, str]]:
    """(module, name) of every import; the name is empty where the module itself is imported."""
    found = list[tuple[str, str]]()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found += ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: expected absolute imports"
            found += ((node.module or "", alias.name) for alias in node.names)
    return found


def imported_modules(module: str) -> set[str]:
    """Our modules that a module imports."""
    full = {f"{source}.{name}" if f"{source}.{name}" in sources() else source for source, name in imports(module)}
    return full & sources().keys() - {module}


@cache
def graph() -> Mapping[str, set[str]]:
    """Module -> modules of ours that it imports."""
    return {module: imported_modules(module) for module in sources()}


@cache
def foreign() -> Mapping[str, set[str]]:
    """Module -> top-level packages that it imports."""
    return {module: {source.partition(".")[0] for source, _ in imports(module)} for module in sources()}


def within(module: str, names: Iterable[str]) -> bool:
    """Whether a module is one of these or lies in one of these packages."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def names_used(module: str) -> set[str]:
    """All names, attributes and imported names of a module."""
    found = {node.attr for node in nodes(module) if isinstance(node, ast.Attribute)}
    found |= {node.id for node in nodes(module) if isinstance(node, ast.Name)}
    return found | {name for _, name in imports(module)}
