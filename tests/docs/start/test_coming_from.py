"""docs/start/from-flower.md and from-flare.md: our side of the code works with functions that a reader has."""

from __future__ import annotations

import re
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_server.run_settings.spec import from_values
from fl_tasks import Classifier, Examples, Shard, TrainReport
from fl_tasks.batches import batches
from fl_tasks.evaluation import evaluate
from tests.docs.pages import read_page

PAGES = ["docs/start/from-flower.md", "docs/start/from-flare.md"]


def part(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Six examples of three classes."""
    return torch.randn(6, 4), torch.arange(6) % 3


def task_of(page: str) -> Any:
    """The task of the page, with a model and data."""
    [text] = re.findall(r"```python\n(# my_task.py\n.*?)```", read_page(page), re.DOTALL)
    known: dict[str, Any] = {"Classifier": Classifier, "Examples": Examples, "TrainReport": TrainReport, "torch": torch}
    known |= dict.fromkeys(("make_model", "Net"), lambda: torch.nn.Linear(4, 3))
    known |= dict.fromkeys(("load_part", "load_site", "load_held_out"), part)
    exec(compile(text, page, "exec"), known)  # noqa: S102 - the page's own code
    return known["Mine"]()


@pytest.mark.parametrize("page", PAGES)
def test_the_task_trains_and_evaluates(page: str) -> None:
    """A step on the data of a folder, the coordinator's evaluation, and nothing held out on a device."""
    task, shard = task_of(page), Shard(folder=None)
    model = task.model()
    data = task.train_data(shard)
    if hasattr(task, "train"):
        before = model.weight.detach().clone()
        context = SimpleNamespace(learning_rate=0.1, steps=2, each_epoch=lambda: [batches(data, 3, seed=0, steps=2)])
        assert task.train(model, data, context).steps == 2
        assert not torch.equal(before, model.weight)
    assert evaluate(task, model, task.eval_data())["loss"] > 0
    assert len(task.eval_data(shard)) == 0


@pytest.mark.parametrize("page", PAGES)
def test_the_runs_file_is_valid(page: str) -> None:
    """It is read as by `fl run create`."""
    [text] = re.findall(r"```toml\n(# run.toml\n.*?)```", read_page(page), re.DOTALL)
    values = tomllib.loads(text)
    assert from_values(values).task.name == "my_task:Mine"
