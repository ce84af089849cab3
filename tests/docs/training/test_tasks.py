"""The page on tasks, models and partitions: its tables are what the code has."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_ops.simulate.settings import parse_simulation
from fl_tasks import BUILT_IN, PartitionSpec, load_task, models
from fl_tasks.partitioning.spec import OPTIONS

PAGE = (Path(__file__).parents[3] / "docs/training/tasks.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Rows of the first table under a heading, as lists of cells, without the table's head."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


TASKS = {row[0].strip("`"): row for row in table("Tasks")}
MODELS = {row[0].strip("`"): row for row in table("Models")}
METHODS = {row[0].strip("`"): row for row in table("Partitions")}


def named(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_task_is_in_the_table() -> None:
    """The names are those of the built-in tasks, in their order."""
    assert list(TASKS) == list(BUILT_IN)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if TASKS[name][3] != "its own"])
def test_a_task_has_the_models_of_its_row(name: str) -> None:
    """A row lists the models or refers to another task's."""
    cell = TASKS[name][3]
    listed = named(TASKS[named(cell)[0]][3] if cell.startswith("as ") else cell)
    task: Any = load_task(name)
    assert list(task.MODELS) == listed


@pytest.mark.parametrize("call", MODELS)
def test_a_model_has_the_parameters_of_its_row(call: str) -> None:
    """The call in the first column makes a model of so many parameters, which takes such input."""
    made = ast.parse(call, mode="eval").body
    assert isinstance(made, ast.Call)
    assert isinstance(made.func, ast.Name)
    keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in made.keywords}
    with torch.device("meta"):
        model = getattr(models, made.func.id)(*map(ast.literal_eval, made.args), **keywords)
        size, _, tokens = MODELS[call][1].partition(" ")
        shape = [int(side) for side in size.split("x")]
        assert model(torch.zeros(2, *shape, dtype=torch.int64 if tokens else None)).shape[0] == 2
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" == MODELS[call][2]


def test_every_model_is_in_the_table() -> None:
    """All public names of fl_tasks.models occur."""
    assert set(models.__all__) == {call.split("(")[0] for call in MODELS}


def test_every_method_is_in_the_table_with_its_options() -> None:
    """Methods and the options that each reads are those of PartitionSpec."""
    assert {name: tuple(named(row[1])) for name, row in METHODS.items()} == dict(OPTIONS)


def test_the_settings_make_a_spec() -> None:
    """The example of a device's settings is a partition that can be made."""
    example = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])
    assert PartitionSpec(**example["shard"]["partition"]).rotate


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_runs_of_the_data_sets_can_be_read(number: int) -> None:
    """Each example is a run's file whose task takes the options, and whose clients follow from the partition."""
    example = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[number])
    config = parse_simulation(example)
    task = load_task(config.run.task.name, config.run.task.options)
    assert task.model() is not None
    natural = config.simulation.partition["method"] == "natural"
    assert config.simulation.partition_spec(1).clients == (0 if natural else 100)


def test_the_page_says_what_was_not_tested_with_the_data() -> None:
    """Files of the tests stand for FEMNIST and CelebA."""
    assert "were tested with small files made by the tests in LEAF's format, not with the data sets" in PAGE
