"""Imports code from outside by its path, and identifies it by the text of its module."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from algorithms.outside_code import outside_code
from fl_extensions.naming import Kind, comma_separated
from fl_extensions.process_state import process_state_kept


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
    known, importing = module_name in sys.modules, f"importing {module_name} for {kind.noun} {name}"
    try:
        with outside_code(importing, kind.error), process_state_kept(importing, kind.error):
            module = importlib.import_module(module_name)
    except kind.error as error:
        if not known:
            sys.modules.pop(module_name, None)  # a second try must fail as this one did
        cause = error.__cause__
        # Only if the module itself or its package is missing, not a module that it imports.
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{module_name}.".startswith(f"{cause.name}."):
            raise kind.error(
                f"there is no module {module_name} for {kind.noun} {name}: install the package that has it into this"
                f" Python (pip install ...), or start in the folder where {module_name.split('.')[0]}.py lies"
            ) from cause
        raise
    with outside_code(f"reading {path} for {kind.noun} {name}", kind.error):
        return _attribute(kind, module, attribute)


def _attribute(kind: Kind, module: ModuleType, attribute: str) -> object:
    if not hasattr(module, attribute):
        here = [
            key
            for key, value in inspect.getmembers(module, inspect.isclass if kind.classes else inspect.isfunction)
            if value.__module__ == module.__name__
        ]
        what = "classes" if kind.classes else "functions"
        raise kind.error(
            f"module {module.__name__} has no attribute {attribute}; its {what} are {comma_separated(here)}"
        )
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
