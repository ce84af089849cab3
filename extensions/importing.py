"""Imports code from outside by its path, and identifies it by the text of its module."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from extensions.naming import Kind, comma_separated


@contextmanager
def authors_code(what: str, error: type[ValueError]) -> Iterator[None]:
    """Run code from outside. Its exceptions become an `error` that names `what` and has them as cause."""
    try:
        yield
    except error:
        raise
    except Exception as raised:  # a fault in foreign code, of any type
        raise error(f"{what} raised {type(raised).__name__}: {raised}") from raised


def attribute_of(kind: Kind, path: str, name: str) -> object:
    """The attribute at `module:attribute`. The module may also lie in the current directory.

    The caller has checked with `naming.path_of` that this machine allows it. name: for messages.

    Raises:
        ValueError: of `kind.error`: there is no such module or attribute. An exception of the module is its cause.
    """
    module_name, _, attribute = path.partition(":")
    # Last, so that a file in the current directory replaces no installed module.
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        with authors_code(f"importing {module_name} for {kind.noun} {name}", kind.error):
            module = importlib.import_module(module_name)
    except kind.error as error:
        cause = error.__cause__
        # Only if the module itself or its package is missing, not a module that it imports.
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{module_name}.".startswith(f"{cause.name}."):
            raise kind.error(
                f"there is no module {module_name} for {kind.noun} {name}: install the package that has it into this"
                f" Python (pip install ...), or start in the folder where {module_name.split('.')[0]}.py lies"
            ) from cause
        raise
    if not hasattr(module, attribute):
        here = [
            key
            for key, value in inspect.getmembers(module, inspect.isclass if kind.classes else inspect.isfunction)
            if value.__module__ == module_name
        ]
        what = "classes" if kind.classes else "functions"
        raise kind.error(f"module {module_name} has no attribute {attribute}; its {what} are {comma_separated(here)}")
    return getattr(module, attribute)


def source_digest(defined: Any) -> str | None:
    """SHA-256 in hex of the text of the module that defines a class or a function; None if there is no text.

    It is the same in every process and on every machine with the same text, with any line endings.
    """
    try:
        path = None if defined.__module__ in sys.stdlib_module_names else inspect.getsourcefile(defined)
        text = Path(path).read_text(encoding="utf-8") if path else None
    except (TypeError, OSError):
        text = None
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()
