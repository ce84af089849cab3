"""docs/start/bring-your-own-model.md, from the smallest case to everything of one's own: each step is run."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import parse_simulation
from tests.marks import slow_except

PAGE = (Path(__file__).parents[3] / "docs/start/bring-your-own-model.md").read_text(encoding="utf-8")
WINE = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Wine" in block)
MODULES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
RUNS = {name: tomllib.loads(text) for name, text in re.findall(r"```toml\n# (\w+)\.toml\n(.*?)```", PAGE, re.DOTALL)}
CHANGES = [name for name in RUNS if name != "run"]
STEPS = {
    "dict batches with an attention mask": "reviews",
    "a training loop": "looped",
    "a method and a reducer": "my_methods",
    "a frozen backbone with adapters": "adapted",
}
"""Row of the page's table -> its module."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with the page's modules."""
    (tmp_path / "my_task.py").write_text(WINE, encoding="utf-8")
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_task", *MODULES):
        sys.modules.pop(name, None)


def run_with(change: str) -> dict[str, Any]:
    """run.toml with the tables of another file of the page in place of its own keys."""
    merged = {name: dict(table) if isinstance(table, dict) else table for name, table in RUNS["run"].items()}
    for name, table in RUNS.get(change, {}).items():
        merged[name] = {**merged.get(name, {}), **table} if isinstance(table, dict) else table
    return merged


@cache
def losses(change: str) -> list[float]:
    """The held-out loss after each round of a simulated run with this change."""
    reports: list[Report] = []
    simulate(Job(parse_simulation(run_with(change)), 1, None), reports.append)
    result = reports[-1]
    assert isinstance(result, SeedResult), result
    assert result.status == "completed", result
    return [done.metrics["loss"] for done in result.rounds]


def test_every_listing_of_the_steps_is_run() -> None:
    """No listing lacks its file's name; the row of each step has the number of its lines."""
    steps = PAGE.split("## Step by step")[1]
    assert len(re.findall("```(?:python|toml)", steps)) == len(MODULES) + len(RUNS)
    assert set(STEPS.values()) == set(MODULES)
    for row, module in STEPS.items():
        lines = re.search(rf"^\| {row} \| (\d+) \|", PAGE, re.MULTILINE)
        assert lines
        assert int(lines[1]) == 1 + len(MODULES[module].rstrip().splitlines())
    assert re.search(r"^\| the task above \| (\d+) \|", PAGE, re.MULTILINE)[1] == str(len(WINE.strip().splitlines()))  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", slow_except(["run", *CHANGES], *(change for change in ["run", *CHANGES] if change != "adapted"))
)
def test_a_step_trains(change: str) -> None:
    """Five rounds lower the held-out loss, with each part of one's own."""
    found = losses(change)
    assert len(found) == 5
    assert found[-1] < found[0]


@pytest.mark.slow
def test_each_step_changes_the_result() -> None:
    """AdamW, the method with its reducer and the personal head lead to other models than the plain run."""
    plain = losses("run")
    assert all(losses(change) != plain for change in ("adamw", "own_method", "personal"))
