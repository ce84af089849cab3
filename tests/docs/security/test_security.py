"""docs/security/: every test that the pages name exists, and every row of the tables of security.md has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE, PRIVACY = ((ROOT / f"docs/security/{name}.md").read_text(encoding="utf-8") for name in ("security", "privacy"))
NAMED = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE + PRIVACY))


def test_every_named_test_exists() -> None:
    """A test that is renamed or removed is noticed."""
    assert len(NAMED) > 100
    trees = [(path, ast.parse((ROOT / path).read_text(encoding="utf-8"))) for path in {path for path, _ in NAMED}]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    there = {(path, node.name) for path, tree in trees for node in tree.body if isinstance(node, functions)}
    assert NAMED - there == set()


@pytest.mark.parametrize("section", ["Threat model", "Attacks that were tried"])
def test_every_row_has_a_test(section: str) -> None:
    """Its end names one, or a case of the test in a row above."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith(("| ", "- **"))]
    assert len(rows) > 10
    named = re.compile(r"`tests/[\w/]+\.py::|\(the same \(")
    assert [row for row in rows if not named.search(row) and not row.startswith(("| asset", "| ---"))] == []


def test_named_cases_exist() -> None:
    """The cases in parentheses are the functions that attack tokens."""
    code = (ROOT / "tests/processes/token_attacks.py").read_text(encoding="utf-8")
    table = PAGE.partition("\n## Attacks that were tried\n")[2].partition("\n## ")[0]
    cases = {
        case for cell in re.findall(r" \((`[\w`, ]+)\)\)$", table, re.MULTILINE) for case in re.findall(r"\w+", cell)
    }
    assert len(cases) == 7
    assert [case for case in cases if f"\ndef {case}(" not in code] == []


def test_the_report_page_is_where_it_is_looked_for() -> None:
    """The hosting site shows SECURITY.md of the root."""
    assert "Report a vulnerability" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
