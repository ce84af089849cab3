"""docs/training/own-loop.md and docs/training/personal.md: their files run, and their tables list every method."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import algorithms as fl
from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import parse_simulation

FOLDER = Path(__file__).parents[3] / "docs/training"
OWN_LOOP, PERSONAL = ((FOLDER / f"{page}.md").read_text(encoding="utf-8") for page in ("own-loop", "personal"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with the files of both pages."""
    for page in (OWN_LOOP, PERSONAL):
        for name, content in re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", page, re.DOTALL):
            (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    for name in ("looped", "personal_digits"):
        sys.modules.pop(name, None)


def simulated(file: Path) -> SeedResult:
    """The result of a run's file."""
    reports: list[Report] = []
    simulate(Job(parse_simulation(tomllib.loads(file.read_text(encoding="utf-8"))), 1, None), reports.append)
    result = reports[-1]
    assert isinstance(result, SeedResult)
    assert result.status == "completed", result.reason
    return result


@pytest.mark.slow
def test_the_loop_of_the_page_learns(folder: Path) -> None:
    """Five rounds of Adam end far above a guess, and each round has the loss of both local epochs."""
    rounds = simulated(folder / "looped.toml").rounds
    assert rounds[-1].metrics["accuracy"] > 0.5
    assert all([epoch.keys() for epoch in row.local_epochs] == [{"loss"}, {"loss"}] for row in rounds)
    assert rounds[-1].local_epochs[1]["loss"] < rounds[0].local_epochs[0]["loss"]


def test_the_loop_of_the_page_is_as_long_as_the_page_of_one_task() -> None:
    """The page promises no number of lines, and a task with a loop needs at most 30."""
    found = re.search(r"```python\n(.*?)```", OWN_LOOP, re.DOTALL)
    assert found
    assert len(found[1].strip().splitlines()) <= 30


def test_the_table_of_methods_is_complete() -> None:
    """Every method has its row: allowed, only inexactly, or never."""
    section = OWN_LOOP[OWN_LOOP.index("## Methods") :]
    allowed = set(re.findall(r"`(\w+)`", section[: section.index("| methods |")])) & set(fl.names())
    rows = {
        row: set(re.findall(r"`(\w+)`", row)) & set(fl.names())
        for row in re.findall(r"^\| `.*$", section, re.MULTILINE)
    }
    inexact = next(names for row, names in rows.items() if "local.inexact" in row)
    never = set().union(*(names for row, names in rows.items() if "| no:" in row))
    built = {name: fl.build(name) for name in fl.names()}
    assert allowed == {name for name, method in built.items() if not method.loop_conflict(inexact=False)}
    assert inexact == {name for name, method in built.items() if method.plain_steps is False and not method.no_loop}
    assert never == {name for name, method in built.items() if method.no_loop}


@pytest.mark.slow
def test_the_personal_heads_of_the_page_fit_their_devices(folder: Path) -> None:
    """Each device has two classes: with its own head it is much better than with the initial one."""
    last = simulated(folder / "personal.toml").rounds[-1].metrics
    assert last["clients_accuracy"] > 0.8
    assert last["clients_accuracy"] > last["clients_accuracy_without_personal"] + 0.3
