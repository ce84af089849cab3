"""Examples, shards, and the convenience class of classifiers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fl_tasks import Classifier, Examples, Shard, Task, TaskError
from fl_tasks.base import task_code
from tests.fl_tasks.tiny import Tiny


def test_examples_want_a_target_for_each_input() -> None:
    """Inputs and targets of different lengths are refused with both numbers."""
    with pytest.raises(TaskError, match="got 3 and 2"):
        Examples(torch.zeros(3, 1), torch.zeros(2))


def test_examples_are_cut_together() -> None:
    """An index tensor takes the same rows of inputs and targets and keeps the augmentation."""
    examples = Examples(torch.arange(5.0), torch.arange(5) * 10, torch.neg)
    part = examples[torch.tensor([4, 1])]
    assert (part.inputs.tolist(), part.targets.tolist()) == ([4.0, 1.0], [40, 10])
    assert part.augment is torch.neg
    assert len(examples[:0]) == 0


def test_a_shard_without_indices_is_everything(tiny: Tiny) -> None:
    """Shard() is the whole training set."""
    assert Shard().of(tiny.examples) is tiny.examples


@pytest.mark.parametrize("indices", [[0, 12], [-1, 3]], ids=["too large", "negative"])
def test_a_shard_refuses_indices_outside_the_data(tiny: Tiny, indices: list[int]) -> None:
    """An index that the data does not have is an error, never an example counted from the end."""
    with pytest.raises(TaskError, match="expected indices from 0 to 11"):
        Shard(torch.tensor(indices)).of(tiny.examples)


def test_a_folder_is_not_indices(tiny: Tiny) -> None:
    """A task that needs indices refuses a folder."""
    with pytest.raises(TaskError, match="got the folder photos: remove the folder"):
        Shard(folder=Path("photos")).of(tiny.examples)


def test_a_task_needs_no_base_class(tiny: Tiny) -> None:
    """The protocol is recognised by its members."""
    assert isinstance(tiny, Task)
    assert not isinstance(object(), Task)


def test_an_exception_of_a_tasks_code_is_named_and_kept() -> None:
    """An exception inside task_code becomes a TaskError with the place in its message and the exception as cause."""
    with pytest.raises(TaskError, match=r"^the loss raised ZeroDivisionError: ") as caught, task_code("the loss"):
        1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_task_error_passes_task_code_unchanged() -> None:
    """A message that was written for the user is not wrapped in another."""
    with pytest.raises(TaskError, match=r"^say this$"), task_code("the loss"):
        raise TaskError("say this")


def test_loss_and_metrics_by_hand() -> None:
    """Scores 0 and ln 3 are probabilities 1/4 and 3/4: class 1 costs ln(4/3), class 0 costs ln 4."""
    output = torch.tensor([[0.0, math.log(3)]]).repeat(2, 1)
    target = torch.tensor([1, 0])
    expected = torch.tensor([math.log(4 / 3), math.log(4)])
    values = Classifier().metrics(output, target)
    torch.testing.assert_close(values["loss"], expected)
    assert values["accuracy"].tolist() == [1.0, 0.0]
    torch.testing.assert_close(Classifier().loss(output, target), expected.mean())


def test_further_axes_are_averaged_within_each_example() -> None:
    """With scores [2, classes, 3] there is still one value for each of the 2 examples; 2 of 3 right is 0.667."""
    output = torch.zeros(2, 4, 3)
    output[:, 0] = 1
    target = torch.tensor([[0, 0, 1], [0, 0, 0]])
    values = Classifier().metrics(output, target)
    torch.testing.assert_close(values["accuracy"], torch.tensor([2 / 3, 1.0]))
    assert values["loss"].shape == (2,)
