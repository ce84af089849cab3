"""docs/start/bring-your-own-model.md: its example is executed like a reader would."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_server.settings.config import ServerConfig
from fl_tasks import PartitionSpec, Shard, fingerprint, load_task, make_partition, training_labels
from fl_tasks.batches import batches, seed_everything
from fl_tasks.evaluation import evaluate
from fl_tasks.naming import GROUP

PAGE = (Path(__file__).parents[3] / "docs/start/bring-your-own-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLE = next(block for block in BLOCKS if "class Wine" in block)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with the example saved as my_task.py."""
    (tmp_path / "my_task.py").write_text(EXAMPLE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    for name in ("my_task", "call", "own"):
        sys.modules.pop(name, None)


def load(name: str, options: dict[str, object] | None = None) -> Any:
    """A task whose data are of any type."""
    return load_task(name, options or {})


def train(task: Any, model: nn.Module, shard: Any, steps: int = 20) -> None:
    """Local steps of plain SGD on one shard."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(task.train_data(shard), 16, seed=0, steps=steps):
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()


def test_the_example_is_at_most_30_lines() -> None:
    """The page promises a task in 30 lines, all of them counted but the empty ones at its ends."""
    assert len(EXAMPLE.strip().splitlines()) <= 30


@pytest.mark.slow
def test_the_example_learns_on_partitioned_data(folder: Path) -> None:
    """my_task:Wine loads by name, is partitioned over eight clients, and training on two lowers the held-out loss."""
    task: Any = load("my_task:Wine", {"hidden": 16.0})
    parts = make_partition(PartitionSpec("dirichlet", 8, alpha=0.5), training_labels(task))
    seed_everything(0)
    model = task.model()
    before = evaluate(task, model, task.eval_data())
    for part in parts[:2]:
        train(task, model, Shard(part))
    after = evaluate(task, model, task.eval_data())
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > before["accuracy"]


def test_the_examples_parts_are_disjoint(folder: Path) -> None:
    """142 samples are trained on, 36 others held out, and a device keeps none for itself."""
    task: Any = load("my_task:Wine")
    assert (len(task.train_data(Shard())), len(task.eval_data())) == (142, 36)
    assert len(task.eval_data(Shard(torch.tensor([0])))) == 0


def test_the_example_has_a_fingerprint(folder: Path) -> None:
    """Version and digest of my_task.py, as server and devices compare them."""
    version, source = fingerprint(load_task("my_task:Wine"))
    assert version == "1"
    assert re.fullmatch("sha256:[0-9a-f]{64}", source)


def test_the_call_of_the_page_works(folder: Path) -> None:
    """The block that checks a task runs as it stands: importing it raises nothing."""
    (folder / "call.py").write_text(next(block for block in BLOCKS if "load_task(" in block))
    importlib.import_module("call")


def test_a_shard_can_be_a_folder(folder: Path) -> None:
    """The method of the page reads inputs.npy and targets.npy from the device's folder."""
    np.save(folder / "inputs.npy", np.ones((3, 13), dtype=np.float32))
    np.save(folder / "targets.npy", np.arange(3))
    imports = "import numpy as np\nimport torch\nfrom fl_tasks import Examples, Shard\n"
    (folder / "own.py").write_text(f"{imports}class Own:\n{next(block for block in BLOCKS if 'shard.folder' in block)}")
    examples = importlib.import_module("own").Own().train_data(Shard(folder=folder))
    assert (examples.inputs.shape, examples.targets.tolist()) == ((3, 13), [0, 1, 2])


def test_the_configuration_of_the_page_loads(folder: Path) -> None:
    """The [task] table is TOML, and its name and options make the task."""
    table = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])["task"]
    assert load_task(table["name"], table["options"]).__dict__["hidden"] == 32


def test_the_settings_of_the_page_allow_the_task() -> None:
    """The coordinator's list has the name that the run's file has, and the entry point means the same."""
    _, server, package = (tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[:3])
    assert ServerConfig(state_dir=Path("s"), insecure=True, **server).tasks == ["my_task:Wine"]
    assert package["project"]["entry-points"][GROUP] == {"wine": "my_task:Wine"}


def test_the_page_shows_how_to_run_it() -> None:
    """The command that a reader copies names the file and the class of the example."""
    assert "fl demo --task my_task:Wine\n" in PAGE
