"""What the code itself says of each key of a settings file."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise


def attribute_docstrings(owner: type) -> dict[str, str]:
    """The strings below the attributes of a class, by the attribute's name, each on one line."""
    (definition,) = ast.parse(inspect.getsource(owner)).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    told = {}
    for before, after in pairwise(body):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            told[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return told
