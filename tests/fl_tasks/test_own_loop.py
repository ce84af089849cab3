"""A task's own training loop: which members count as one, and the checks of what it returns."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fl_tasks import TaskError, TrainContext, TrainReport
from fl_tasks.own_loop import checked_report, most_steps, own_loop


class Looped:
    """Has a training loop."""

    def train(self, model: nn.Module, data: Any, context: TrainContext) -> TrainReport:
        raise NotImplementedError


class Other:
    """Has a member `train` for another purpose."""

    def train(self, path: str) -> None:
        raise NotImplementedError


def test_a_loop_is_found() -> None:
    """A member `train` with three arguments is one. A task without it, and one that is a torch module, have none."""
    task = Looped()
    assert own_loop(task) is task
    assert own_loop(object()) is None
    assert own_loop(nn.Linear(1, 1)) is None


def test_a_member_of_the_same_name_with_other_arguments_is_refused() -> None:
    """The message has the arguments that a loop takes."""
    with pytest.raises(TaskError, match=r"train\(model, data, context\), got one with other arguments"):
        own_loop(Other())


def test_a_valid_report_is_returned_with_plain_numbers() -> None:
    """Metrics of tensors become floats. A value that is not finite stays: the training has diverged."""
    report = checked_report(TrainReport(3, 5, cast(Any, [{"loss": torch.tensor(0.5)}, {"loss": math.nan}])), 5, 10)
    assert (report.steps, report.examples) == (3, 5)
    assert report.metrics[0] == {"loss": 0.5}
    assert math.isnan(report.metrics[1]["loss"])


@pytest.mark.parametrize(
    ("report", "why"),
    [
        pytest.param(None, "to return a TrainReport, got NoneType", id="nothing"),
        pytest.param({"steps": 3, "examples": 5}, "to return a TrainReport, got dict", id="dict"),
        pytest.param(TrainReport(0, 5), r"steps: expected a whole number from 1 to 10 .*, got 0", id="no-steps"),
        pytest.param(TrainReport(11, 5), r"one for each example of the round's work\), got 11", id="many-steps"),
        pytest.param(TrainReport(True, 5), "steps: expected a whole number", id="bool"),
        pytest.param(TrainReport(3, 6), r"examples: expected a whole number from 1 to 5 .*, got 6", id="examples"),
        pytest.param(TrainReport(3, 5, [{"": 1.0}]), "names of 1 to 64 printable characters, got ''", id="no-name"),
        pytest.param(TrainReport(3, 5, [{"a\n": 1.0}]), "printable", id="control-character"),
        pytest.param(TrainReport(3, 5, [{"loss": "low"}]), "expected 'loss' as a number, got 'low'", id="text"),  # type: ignore[dict-item]
        pytest.param(TrainReport(3, 5, [{}] * 101), "at most 100 dicts, one for each epoch, got 101", id="epochs"),
        pytest.param(TrainReport(3, 5, {"loss": 1.0}), "expected a list of at most 100 dicts", id="no-list"),  # type: ignore[arg-type]
        pytest.param(
            TrainReport(3, 5, [{f"m{number}": 0.0 for number in range(17)}]), "at most 16 metrics", id="metrics"
        ),
    ],
)
def test_a_wrong_report_is_refused(report: Any, why: str) -> None:
    """The message names the field, what was expected and what came."""
    with pytest.raises(TaskError, match=why):
        checked_report(report, 5, 10)


def test_the_most_steps_are_one_for_each_example() -> None:
    """Of all epochs, or of the batches that a run with a number of steps gives."""
    assert most_steps(10, 4, epochs=3) == 30
    assert most_steps(10, 4, steps=3) == 12


def test_data_in_an_attribute_named_train_is_no_loop() -> None:
    """Tasks may keep their training set as `self.train`, as the page's first example does."""
    assert own_loop(SimpleNamespace(train=[1, 2, 3])) is None
