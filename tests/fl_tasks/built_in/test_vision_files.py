"""The files of the image data sets: those that are missing, changed, downloaded, or made to run code."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_tasks import Shard, TaskError
from fl_tasks.built_in.vision_files import parse_batch
from fl_tasks.torchvision_compat import import_torchvision
from tests.fl_tasks.built_in.cifar import load, write_cifar10


@pytest.mark.parametrize(
    ("name", "folder", "file"),
    [
        ("fashion-mnist", "FashionMNIST/raw", "train-images-idx3-ubyte"),
        ("cifar10", "cifar-10-batches-py", "data_batch_1, data_batch_2"),
        ("cifar100", "cifar-100-python", "train, test"),
        ("emnist", "EMNIST/raw", "emnist-byclass-train-images-idx3-ubyte"),
        ("emnist-digits", "EMNIST/raw", "emnist-digits-train-images-idx3-ubyte"),
    ],
)
def test_missing_files_are_named_with_folder_and_remedy(tmp_path: Path, name: str, folder: str, file: str) -> None:
    """Without data the message has the folder, the files and both ways to them."""
    task = load(name, {"data_root": str(tmp_path)})
    with pytest.raises(
        TaskError, match=f"{file}.* in {tmp_path}/{folder}, which is missing.*data_root.*download = true"
    ):
        task.train_data(Shard())


def test_files_that_are_not_the_originals_are_refused(tmp_path: Path) -> None:
    """A batch of other bytes is never parsed."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number in range(1, 6):
        (folder / f"data_batch_{number}").write_bytes(b"something else")
    with pytest.raises(TaskError, match="files that are not the originals"):
        load("cifar10", {"data_root": str(tmp_path)}).eval_data()


class Command:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


def test_a_batch_that_is_swapped_after_its_digest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that are parsed are those that were hashed: another file in their place runs nothing."""
    folder, made = write_cifar10(tmp_path, monkeypatch), tmp_path / "made"
    md5 = hashlib.md5

    def swapping(data: bytes, **given: Any) -> Any:
        for name in ("data_batch_1", "batches.meta"):
            (folder / name).write_bytes(pickle.dumps(Command(made)))
        return md5(data, **given)

    monkeypatch.setattr("hashlib.md5", swapping)
    assert load("cifar10", {"data_root": str(tmp_path)})._read(train=True)[1].tolist() == [1, 2, 3, 4, 5]
    assert not made.exists()


@pytest.mark.parametrize("where", ["data", "labels", "more"])
def test_a_batch_that_names_a_function_is_refused(tmp_path: Path, where: str) -> None:
    """Also one with the right digest: the unpickler calls nothing that a file names."""
    made = tmp_path / "made"
    batch = {"data": torch.zeros(1, 3072, dtype=torch.uint8).numpy(), "labels": [1], where: Command(made)}
    with pytest.raises(ValueError, match="expected a batch of CIFAR, got UnpicklingError: the file names"):
        parse_batch(pickle.dumps(batch, protocol=4))
    assert not made.exists()


@pytest.mark.parametrize(
    "batch",
    [
        {"data": torch.zeros(2, 3072, dtype=torch.uint8).numpy(), "labels": [1]},
        {"data": torch.zeros(1, 3072).numpy(), "labels": [1]},
        {"data": [0] * 3072, "labels": [1]},
        {"labels": [1]},
        {"data": torch.zeros(1, 3072, dtype=torch.uint8).numpy(), "labels": ["one"]},
        [1, 2],
    ],
    ids=["rows", "floats", "list", "nothing", "text", "no-dict"],
)
def test_other_arrays_are_refused(batch: object) -> None:
    """A batch has one row of 3,072 bytes for each label."""
    with pytest.raises(ValueError, match="expected a batch of CIFAR"):
        parse_batch(pickle.dumps(batch, protocol=4))


def test_old_pickles_of_torchvision_are_not_read(tmp_path: Path) -> None:
    """`processed/training.pt`, which torchvision prefers to the IDX files, is left alone."""
    (tmp_path / "FashionMNIST" / "processed").mkdir(parents=True)
    for name in ("training.pt", "test.pt"):
        torch.save((torch.zeros(1, 28, 28), torch.zeros(1)), tmp_path / "FashionMNIST" / "processed" / name)
    with pytest.raises(TaskError, match="which is missing train-images-idx3-ubyte"):
        load("fashion-mnist", {"data_root": str(tmp_path)}).train_data(Shard())


def test_downloads_are_asked_for_when_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With download = true torchvision is asked to fetch; what it cannot fetch is an error with its cause."""
    fashion = import_torchvision().datasets.FashionMNIST
    asked = []

    def refuse(url: str, **_: object) -> None:
        asked.append(url)
        raise RuntimeError("no route")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", refuse)
    monkeypatch.setattr(fashion, "mirrors", ["mirror/"])
    task = load("fashion-mnist", {"data_root": str(tmp_path), "download": True})
    with pytest.raises(TaskError, match="is missing train-images-idx3-ubyte") as caught:
        task.train_data(Shard())
    assert asked
    assert isinstance(caught.value.__cause__, RuntimeError)
