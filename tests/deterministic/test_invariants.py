"""Every check of the simulation stands for an invariant and finds a fault that is planted for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deterministic import invariants
from tests.deterministic.first_seeds import PLANTED
from tests.deterministic.invariants import INVARIANTS, RESTORED

FOLDER = Path(__file__).parent
MODULES = {
    1: ("core_buffer", "core_checks", "core_driver", "core_effects", "core_life", "core_stages"),
    2: ("checks", "life", "living", "loop", "objects", "operators", "pauses", "private_records", "private_rounds",
        "promises", "uptime"),
}  # fmt: skip
"""The modules of each depth that have checks."""
PATCHES = {
    1: {"planted": "PLANTED", "planted_stages": "STAGES", "planted_buffer": "BUFFER"},
    2: {"planted_system": "PLANTED", "planted_more": "MORE", "planted_privacy": "PRIVATE", "planted_objects": "STORED"},
}
"""The modules of each depth that plant faults, with the dictionary of each."""


def tree_of(module: str) -> ast.Module:
    """A module of the simulation, which is not imported: depth 2 replaces parts of the product."""
    return ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))


def checks_of(module: str) -> Iterator[str]:
    """The names of a module's checks: how what each of them raises or notes begins."""
    for node in ast.walk(tree_of(module)):
        match node:
            case ast.Assert(msg=ast.expr() as text):
                yield from names_of(text)
            case ast.Raise(exc=ast.Call(func=ast.Name("AssertionError" | "Violated" | "StuckLoop"), args=[text])):
                yield from names_of(text)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="violations"), attr="append"), args=[text]):
                yield from names_of(text)


def names_of(text: ast.expr) -> Iterator[str]:
    """The text before the colon. One with the field of a state stands for each field."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    begin = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts).partition(":")[0]
    yield from [begin.format(name) for name in RESTORED] if "{}" in begin else [begin]


def keys_of(module: str, name: str) -> list[str]:
    """The keys of a dictionary in a module."""
    for node in tree_of(module).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.Dict(keys=keys)) if target == name:
                return [ast.literal_eval(key) for key in keys if key]
    raise ValueError(f"expected a dictionary {name} in {module}, got none")


@pytest.mark.parametrize("depth", MODULES)
def test_every_check_stands_for_an_invariant(depth: int) -> None:
    """The checks in the code are those of the table, each at one place."""
    found = [name for module in MODULES[depth] for name in checks_of(module)]
    listed = [name for checks in INVARIANTS.values() for name in checks.get(depth, ())]
    assert sorted(found) == sorted(listed)
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("depth", MODULES)
def test_every_check_finds_a_planted_fault(depth: int) -> None:
    """No check is without a fault that is planted for it, and every planted fault is listed with its check."""
    checks = {name for checks in INVARIANTS.values() for name in checks.get(depth, ())}
    assert {check for check, _ in PLANTED[depth].values()} == checks
    assert {fault for module, name in PATCHES[depth].items() for fault in keys_of(module, name)} == set(PLANTED[depth])


def test_what_the_simulation_cannot_see_has_other_tests() -> None:
    """Each of these invariants names tests that are there."""
    paths = [test for tests in invariants.ELSEWHERE.values() for test in tests]
    assert [path for path in paths if not (FOLDER.parents[1] / path).exists()] == []


def test_the_page_has_the_invariants() -> None:
    """docs/measurements/reliability.md has the table of today."""
    assert invariants.PAGE.read_text(encoding="utf-8") == invariants.page(), (
        "python -m tests.deterministic.invariants writes it"
    )
