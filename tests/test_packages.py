"""What a package holds: its docstring, its modules, and code in `__init__`."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.sources import MAY_IMPORT, ROOT, module_name

GENERATED = {"protos.fl", "protos.fl.v1"}
"""Packages of generated code, which needs no docstring about its purpose."""


@cache
def packages() -> dict[str, ast.Module]:
    """Every package that is not generated -> the syntax tree of its `__init__.py`."""
    paths = {module_name(path): path for top in MAY_IMPORT for path in (ROOT / top).rglob("__init__.py")}
    return {name: ast.parse(path.read_text()) for name, path in paths.items() if name not in GENERATED}


def test_every_package_describes_itself() -> None:
    """The docstring of `__init__.py`: its purpose, what may enter it and what may not, in at least two sentences."""
    texts = {package: ast.get_docstring(tree) or "" for package, tree in packages().items()}
    short = {package for package, text in texts.items() if len(re.findall(r"\.(?=\s|$)", text)) < 2 or "TODO" in text}
    assert short == set()


CODE_IN_INIT = {"benchmarks"}
"""Packages with code in `__init__`. This list only gets shorter."""


def test_a_folder_holds_more_than_one_module() -> None:
    """A folder is a subject of several modules; a subject of one module is a module."""
    folders = {path.parent for top in MAY_IMPORT for path in (ROOT / top).rglob("*.py")}
    modules = {folder: [path for path in folder.glob("*.py") if path.name != "__init__.py"] for folder in folders}
    below = {folder.parent for folder in folders}
    single = {folder for folder, paths in modules.items() if len(paths) == 1 and folder not in below}
    generated = {"fl_server/store/database/migrations/versions"}
    assert {str(folder.relative_to(ROOT)) for folder in single} == generated


def test_packages_have_no_code() -> None:
    """An `__init__.py` holds a docstring and public names of its modules."""

    def is_name(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return ast.unparse(node.targets[0]) == "__all__"
        return isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        )

    with_code = {package for package, tree in packages().items() if not all(is_name(node) for node in tree.body)}
    assert with_code <= CODE_IN_INIT
