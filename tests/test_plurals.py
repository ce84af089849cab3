"""A count that may be 1 stands before its noun by `counted` alone: no message says "1 clients"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_common.units import counted
from fl_server.rounds import events

ROOT = Path(__file__).parents[1]
NOUNS = re.compile(
    r" (clients|devices|tokens|rounds|runs|updates|examples|steps|epochs|days|attempts|tensors|evaluations|keys|files"
    r"|cells|charges|labels|times|values)\b(?!\()"
)
NEVER_ONE = {
    "fl_ops/demo", "fl_ops/compare/report.py", "fl_common/secure_aggregation",
    "fl_server/aggregation/secure_aggregation.py", "fl_server/run/secure_stages.py", "fl_server/rounds/secure.py",
}  # fmt: skip
"""Numbers there are at least two: the demo's settings, seeds of a comparison, groups with masks."""


def found(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, value and noun) of each f-string where a value that is no constant stands before a plural."""
    for string in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        for value, text in zip(string.values, string.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            name = ast.unparse(value.value)
            by_number = value.format_spec is None or ast.unparse(value.format_spec) == "f','"
            constant = re.fullmatch(r"(\w+\.)*_?[A-Z][A-Z_0-9]*", name)
            words = isinstance(value.value, ast.Call) and not name.startswith("len(")
            if by_number and not constant and not words and NOUNS.match(str(text.value)):
                yield string.lineno, f"{{{name}}}{text.value!s}"


def modules() -> list[Path]:
    """Those whose messages people read."""
    packages = ("fl_server", "fl_client", "fl_ops", "fl_web", "fl_common")
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_count_that_may_be_one_has_a_plural() -> None:
    """`counted(n, "client")` gives both."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in modules()
        if not any(str(path.relative_to(ROOT)).startswith(place) for place in NEVER_ONE)
        for line, text in found(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert wrong == []


@pytest.mark.parametrize("helper", [counted, events.counted])
def test_a_count_has_its_noun(helper: object) -> None:
    """The core has the same words."""
    assert callable(helper)
    assert [helper(0, "client"), helper(1, "client"), helper(2, "process", "processes")] == [
        "0 clients", "1 client", "2 processes",
    ]  # fmt: skip
