"""docs/training/data.md: its listings run."""

from __future__ import annotations

import importlib
import re
import sqlite3
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from algorithms import LocalData, LocalOptions, LocalRule, LocalSettings, train_locally
from fl_client.settings.served_tasks import ShardConfig
from fl_client.training.data import local_data
from fl_tasks import PartitionSpec, Shard, load_task, partition_task, training_labels
from fl_tasks.batches import batches, ordered_batches, seed_everything
from fl_tasks.data.forms import as_data, forward_of
from fl_tasks.data.shard import checked_shard
from fl_tasks.evaluation import evaluate
from fl_tasks.loading import load_function

PAGE = (Path(__file__).parents[3] / "docs/training/data.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with all listings as files."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    torch.set_num_threads(1)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def module(name: str) -> ModuleType:
    """A listing as a module."""
    return importlib.import_module(name)


def test_every_listing_with_a_name_is_tested() -> None:
    """A new file needs a test here."""
    assert set(FILES) == {"lines_task.py", "reviews_task.py", "photos_task.py", "files_task.py", "ward_data.py"}


def test_dict_batches_are_partitioned_and_trained_on(folder: Path) -> None:
    """The lines are partitioned among four clients, and 40 steps of one client lower the held-out loss."""
    task = load_task("lines_task:NextCharacter")
    parts = partition_task(PartitionSpec("iid", 4), task)
    train, held_out = local_data(task, Shard(parts[0]), CPU)
    assert (len(train), len(held_out)) == (50, 0)
    seed_everything(0)
    model = task.model()
    before = evaluate(task, model, as_data(task.eval_data()))
    data = LocalData(batches(train, 16, 1, steps=40), (), task.loss, forward_of(task))
    train_locally(model, data.batches, data.loss, LocalRule(), LocalSettings(0.5), LocalOptions(forward=data.forward))
    after = evaluate(task, model, as_data(task.eval_data()))
    assert after["loss"] < before["loss"]


def test_rows_of_a_csv_file_are_batches(folder: Path) -> None:
    """The datasets library reads the file; a shard of it has dict batches of tensors."""
    pytest.importorskip("datasets")
    rows = "".join(f"{at},{at % 2}\n" for at in range(9))
    (folder / "reviews.csv").write_text(f"length,stars\n{rows}")
    task = module("reviews_task").Reviews()
    data = as_data(task.train_data(Shard(torch.tensor([8, 1, 4]))))
    (batch,) = ordered_batches(data, 4)
    assert {name: values.tolist() for name, values in batch.items()} == {"length": [8, 1, 4], "stars": [0, 1, 0]}


@pytest.mark.slow
def test_folders_of_photos_are_read_by_workers(folder: Path) -> None:
    """Two classes of three images; the crops have the same bits with and without workers."""
    for number in range(6):
        path = folder / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((32, 32), 60).convert("RGB").save(path)
    made: list[Any] = []
    for workers in (0, 1):
        task = module("photos_task").Photos(workers=workers)
        assert training_labels(task).tolist() == [0, 0, 0, 1, 1, 1]
        data = task.train_data(Shard(torch.tensor([0, 3, 4])))
        made.append([(inputs.clone(), targets.tolist()) for inputs, targets in batches(data, 2, 1, epochs=2)])
        data.close()
    assert made[0][0][0].shape == (2, 3, 24, 24)
    assert all(torch.equal(one, other) and a == b for (one, a), (other, b) in zip(*made, strict=True))


def test_files_are_read_one_after_the_other(folder: Path) -> None:
    """Three files of 64 examples: twelve batches of 16 in every epoch, with all examples, in a new order."""
    for number in range(3):
        numbers = torch.arange(64) + 64 * number
        torch.save({"sound": numbers.float(), "text": numbers}, folder / f"{number}.pt")
    data = module("files_task").Recordings().train_data(Shard(folder=folder))
    made = [batch["text"].tolist() for batch in batches(data, 5, 1, epochs=2)]
    assert [len(batch) for batch in made] == [16] * 24
    epochs = [[number for batch in part for number in batch] for part in (made[:12], made[12:])]
    assert [sorted(epoch) for epoch in epochs] == [[*range(192)]] * 2
    assert epochs[0] != epochs[1]


def test_the_query_returns_rows(folder: Path) -> None:
    """The settings on the page name the function on the page."""
    with sqlite3.connect("ward.db") as database:
        database.execute("CREATE TABLE patients (id, pressure, pulse, risk)")
        database.execute("INSERT INTO patients VALUES (1, 120, 70, 0)")
    settings, *_ = [block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "query" in block]
    config = ShardConfig.model_validate(tomllib.loads(settings)["shard"])
    assert config.query is not None
    assert checked_shard(load_function(config.query)()).rows == [(120, 70, 0)]
