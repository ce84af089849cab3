"""Labels are compared with the names of a task's classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fl_tasks import Batched, Examples, Samples, TaskError
from fl_tasks.batches import batches, ordered_batches
from fl_tasks.data.forms import Data
from fl_tasks.data.labels import class_names, numbered
from fl_tasks.loading import fingerprint
from tests.fl_tasks.tiny import Tiny


class Named(Tiny):
    """A task whose classes have names."""

    classes = ("cat", "dog", "owl")


class Folder:
    """A data set as torchvision's folders are: it numbers its classes itself."""

    def __init__(self, *classes: str) -> None:
        self.classes = list(classes)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1), index


def examples(targets: list[int], classes: list[str] | None = None) -> Examples:
    """Examples with these labels."""
    return Examples(torch.zeros(len(targets), 1), torch.tensor(targets), classes=classes)


def labels(data: object) -> list[int]:
    """The labels that the task's data gets."""
    found = numbered(Named(), data, "the data")  # type: ignore[arg-type] # of any form
    assert isinstance(found, Examples)
    return found.targets.tolist()


def test_examples_in_another_order_get_the_tasks_numbers() -> None:
    """By name. Ignored labels stay, and so do labels without names."""
    assert labels(examples([0, 1, 1, -100], ["owl", "cat"])) == [2, 0, 0, -100]
    assert labels(examples([2, 1, -100])) == [2, 1, -100]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(examples([0, 3, 7]), r"0 to 2 \(cat, dog, owl\), got 2 others, as 3 of example 1", id="over"),
        pytest.param(examples([0, -1]), "got 1 others, as -1 of example 1", id="negative"),
        pytest.param(examples([0, 1], ["cat", "bird"]), "got 1 labels of others, as 'bird'", id="unknown"),
        pytest.param(examples([5], ["dog", "cat"]), "labels of 0 to 1", id="over-their-own"),
        pytest.param(Examples(torch.zeros(1, 1), torch.zeros(1)), "got torch.float32: convert", id="float"),
        pytest.param(Samples(Folder("dog", "cat", "owl")), "in this order, got dog, cat, owl from Folder", id="folder"),
    ],
)  # fmt: skip
def test_other_labels_are_refused_when_the_data_is_loaded(data: object, message: str) -> None:
    """The error has the count, an example, and the names."""
    with pytest.raises(TaskError, match=rf"the data: expected .*{message}"):
        labels(data)


def test_a_folder_with_the_tasks_classes_is_taken() -> None:
    """Also a part of it, and a data set that does not name its classes."""
    for data in (Samples(Folder(*Named.classes)), Samples(Folder(*Named.classes))[:0], Samples([])):
        found = numbered(Named(), data, "the data")
        assert isinstance(found, Samples)
        assert found.dataset is data.dataset


def pair(*targets: int) -> tuple[Tensor, Tensor]:
    """A batch with these labels."""
    return torch.zeros(len(targets), 1), torch.tensor(targets)


READ: list[tuple[str, Data, Data]] = [
    ("batched", Batched(lambda _: [pair(0, 2), pair(1, 7)], 2, 4), Batched(lambda _: [pair(0, -100)], 1, 2)),
    ("samples", Samples([(torch.zeros(1), label) for label in (0, 2, 1, 7)]), Samples([(torch.zeros(1), 2)])),
]
"""(form, data with the label 7 as its last, data with good ones)."""


@pytest.mark.parametrize(("wrong", "right"), [case[1:] for case in READ], ids=[case[0] for case in READ])
def test_labels_that_are_read_batch_by_batch_are_checked_before_their_step(wrong: Data, right: Data) -> None:
    """In training, evaluation and full gradients; of a task without names they are not."""
    message = r"the data: expected labels of 0 to 2 \(cat, dog, owl\), got 1 others, as 7 of example"
    checked = numbered(Named(), wrong, "the data").to("cpu")
    for read in (ordered_batches(checked, 2), batches(checked, 2, 0, epochs=1)):
        with pytest.raises(TaskError, match=message):
            list(read)
    assert len(list(ordered_batches(wrong, 2))) == 2
    assert len(list(ordered_batches(numbered(Named(), right, "the data"), 2))) == 1


def test_batches_whose_labels_are_not_known_are_not_checked() -> None:
    """A dict of the task's own."""
    data = numbered(Named(), Batched(lambda _: [{"labels": torch.tensor([7])}], 1, 1), "the data")
    assert len(list(ordered_batches(data, 1))) == 1


def test_the_names_are_part_of_the_fingerprint() -> None:
    """Another order is another version: a device with it is refused. A number under this name is no list of names."""
    version, source = fingerprint(Named())
    task = Named()
    task.classes = ("dog", "cat", "owl")
    other, same = fingerprint(task)
    assert (version != other, source == same) == (True, True)
    assert version.startswith("1, 3 classes ")
    task.classes = 10  # type: ignore[assignment] # as another task may have it
    assert class_names(task) == ()
