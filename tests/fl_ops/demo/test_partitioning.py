"""The data of the demo, and errors before the training."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_ops import environment
from fl_ops.demo.partitioning import partition
from fl_ops.demo.settings import DemoSettings
from fl_ops.errors import UsageError

TASK = """
import torch
from fl_tasks import Classifier, Examples

class Unmeasured(Classifier):
    def model(self):
        return torch.nn.Linear(1, 2)

    def train_data(self, shard):
        return shard.of(Examples(torch.ones(4, 1), torch.arange(4) % 2))

    def eval_data(self, shard=None):
        return Examples(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64))

    def metrics(self, output, target):
        return {"loss": output[:, 0]}

class Broken(Unmeasured):
    def model(self):
        raise RuntimeError("no such model")
"""


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in this folder."""
    (tmp_path / "demo_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("demo_task", None)


def test_the_partition_file(tmp_path: Path) -> None:
    """Disjoint parts of digits for all clients; the returned counts match the file."""
    data = partition(DemoSettings(), tmp_path / "partition.json")
    parts = json.loads((tmp_path / "partition.json").read_text())["parts"]
    assert [len(part) for part in parts] == [sum(row) for row in data.classes] == [71] * 20
    assert data.evaluation_examples == 360


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DemoSettings(algorithms=("fedsgd",)), '--algorithm: expected a built-in algorithm .*fedcm.*, got "fedsgd"'),
        (DemoSettings(task="digit"), 'Did you mean "digits"'),
        (DemoSettings(clients=2000), "at least one example for each of 2000 clients"),
        (DemoSettings(clients=2, task="demo_task:Unmeasured"), "by the metric 'accuracy', and task .* has loss"),
        (DemoSettings(clients=2, task="demo_task:Broken"), "raised RuntimeError: no such model"),
    ],
)
def test_unusable_settings_are_reported(own_task: None, tmp_path: Path, settings: DemoSettings, expected: str) -> None:
    """The error has what was expected and found, or the task's own error."""
    with pytest.raises(UsageError, match=expected):
        partition(settings, tmp_path / "partition.json")


def test_missing_matplotlib_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported at the start, not when the plot is drawn."""
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'impetus-fl\[demo\]'"):
        environment.check_plotting("fl demo")


def test_missing_scikit_learn_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It contains the digits."""
    monkeypatch.setattr("fl_tasks.built_in.digits.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'impetus-fl\[digits\]'"):
        partition(DemoSettings(), tmp_path / "partition.json")


def test_a_task_without_classes_is_partitioned_at_random(tmp_path: Path) -> None:
    """Dict batches of sequences: random parts, which the page describes without a table of classes."""
    data = partition(
        DemoSettings(clients=8, task="tests.processes.sequence_task:Counting"), tmp_path / "partition.json"
    )
    stored = json.loads((tmp_path / "partition.json").read_text())
    assert (data.method, stored["spec"]["method"]) == ("iid", "iid")
    assert [len(part) for part in stored["parts"]] == [row[0] for row in data.classes] == [12, 12] + [11] * 6
    assert data.evaluation_examples == 20
