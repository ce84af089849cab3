"""What is refused before anything is trained."""

from __future__ import annotations

import json
import sys

import pytest

from fl_ops.demo import dealing
from fl_ops.demo.settings import DemoSettings
from fl_ops.errors import Misused

TASK = """
import torch
from tasks import Classifier, Examples

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
def own_task(tmp_path, monkeypatch):
    """A module in this folder."""
    (tmp_path / "demo_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("demo_task", None)


def test_the_data_are_dealt_once_as_a_file(tmp_path):
    """Eight parts of digits, none with an example of another's, and the counts are those of the page."""
    dealt = dealing.deal(DemoSettings(), tmp_path / "partition.json")
    parts = json.loads((tmp_path / "partition.json").read_text())["parts"]
    assert [len(part) for part in parts] == [sum(row) for row in dealt.classes] == [179] * 8
    assert dealt.evaluation_examples == 360


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (DemoSettings(algorithms=("fedsgd",)), "--algorithm: expected one of .*fedcm.*, got 'fedsgd'"),
        (DemoSettings(task="digit"), 'Did you mean "digits"'),
        (DemoSettings(clients=2000), "at least one example for each of 2000 clients"),
        (DemoSettings(clients=2, task="demo_task:Unmeasured"), "by the metric 'accuracy', and task .* has loss"),
        (DemoSettings(clients=2, task="demo_task:Broken"), "raised RuntimeError: no such model"),
    ],
)
def test_what_cannot_be_is_told(own_task, tmp_path, settings, told):
    """What was expected, what came, and in the task's own words where it raises."""
    with pytest.raises(Misused, match=told):
        dealing.deal(settings, tmp_path / "partition.json")


def test_missing_matplotlib_is_told_with_its_remedy(monkeypatch):
    """Before anything is started, not when the picture is due."""
    monkeypatch.setattr(dealing, "find_spec", lambda name: None)
    with pytest.raises(Misused, match=r"pip install impetus-fl\[demo\]"):
        dealing.check_installed()


def test_missing_scikit_learn_is_told_with_its_remedy(monkeypatch, tmp_path):
    """The digits come with it."""
    monkeypatch.setattr("tasks.digits.find_spec", lambda name: None)
    with pytest.raises(Misused, match=r"pip install impetus-fl\[demo\]"):
        dealing.deal(DemoSettings(), tmp_path / "partition.json")
