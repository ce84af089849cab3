"""Reads the image data sets' files through torchvision, as bytes. Errors name the missing files and their folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.base import TaskError
from tasks.torchvision_compat import import_torchvision

Images = tuple[Tensor, Tensor]
"""uint8 [n, channels, height, width] and int64 labels [n]."""

UNREADABLE = (RuntimeError, OSError, ValueError, TypeError, AssertionError)
"""torchvision's exceptions for missing, changed or truncated files."""

CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_OFFICIAL_TEST = "test_batch"

CIFAR_SHORT_BYTES = 30_740_222
CIFAR_SHORT_MD5 = {
    "data_batch_1": "d46ec4c9ee3ee9e99e11d85c33cf907d",
    "data_batch_2": "b59052152463b1ca2854db63c8851ec4",
    "data_batch_3": "d898a7faaf1991199b2be2d48a89acc1",
    "data_batch_4": "05a96f02fd0ef7a2205a873680b2f6b1",
    "data_batch_5": "a25fbf3484c0105d16d9217846fae6a7",
}
"""Digests of files with the same images and labels, but without the list of the images' file names at the end."""


def fashion_mnist(root: Path, train: bool, download: bool) -> Images:
    """60,000 training or 10,000 test images, [n, 1, 28, 28]."""
    kind = import_torchvision().datasets.FashionMNIST
    prefix = "train" if train else "t10k"
    files = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]
    data = _open(lambda: kind(root, train=train, download=download), root / "FashionMNIST" / "raw", files)
    return data.data.unsqueeze(1), data.targets


def cifar10(root: Path, train: bool, download: bool) -> Images:
    """50,000 training or 10,000 test images, [n, 3, 32, 32]; without the test batch, 40,000 and batch 5."""
    official = import_torchvision().datasets.CIFAR10
    folder = root / CIFAR_FOLDER
    names = [name for name, _ in official.train_list]
    if download and not all((folder / name).exists() for name in names):
        _open(lambda: official(root, download=True), folder, [*names, CIFAR_OFFICIAL_TEST])
    batches = [_entry(folder, name, md5) for name, md5 in official.train_list]
    kind = official
    if cifar10_holds_out_batch_5(root):
        kind = type("Cifar10HeldOut", (official,), {"train_list": batches[:4], "test_list": batches[4:]})
    data = _open(lambda: kind(root, train=train), folder, names)
    return torch.from_numpy(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)


def cifar100(root: Path, train: bool, download: bool) -> Images:
    """50,000 training or 10,000 test images, [n, 3, 32, 32], with the hundred fine labels."""
    kind = import_torchvision().datasets.CIFAR100
    data = _open(lambda: kind(root, train=train, download=download), root / kind.base_folder, ["train", "test", "meta"])
    return torch.from_numpy(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)


def emnist(root: Path, split: str, train: bool, download: bool) -> Images:
    """The training or the test images of a split, [n, 1, 28, 28], upright; the files store them transposed."""
    prefix = f"emnist-{split}-{'train' if train else 'test'}"
    data = _open_emnist(root, prefix, lambda kind: kind(root, split, train=train, download=download))
    return data.data.transpose(1, 2).unsqueeze(1), data.targets


def emnist_labels(root: Path, split: str, download: bool) -> Tensor:
    """The training labels of a split. The images must exist but are not read."""

    def read(official: Any) -> Any:
        read_labels = import_torchvision().datasets.mnist.read_label_file
        # The class needs this name: torchvision derives the folder from it.
        kind = type("EMNIST", (official,), {"_load_data": lambda self: (None, read_labels(self.labels_file))})
        return kind(root, split, download=download)

    labels: Tensor = _open_emnist(root, f"emnist-{split}-train", read).targets
    return labels


def cifar10_holds_out_batch_5(root: Path) -> bool:
    """Whether the training batches exist and the official test batch does not."""
    folder = root / CIFAR_FOLDER
    return folder.exists() and not (folder / CIFAR_OFFICIAL_TEST).exists()


def _open_emnist(root: Path, prefix: str, read: Callable[[Any], Any]) -> Any:
    files = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]
    return _open(lambda: read(import_torchvision().datasets.EMNIST), root / "EMNIST" / "raw", files)


def _entry(folder: Path, name: str, md5: str) -> list[str]:
    path = folder / name
    short = path.exists() and path.stat().st_size == CIFAR_SHORT_BYTES
    return [name, CIFAR_SHORT_MD5[name] if short else md5]


def _open(read: Callable[[], Any], folder: Path, files: list[str]) -> Any:
    try:
        return read()
    except UNREADABLE as error:
        missing = [name for name in files if not (folder / name).exists()]
        state = f"is missing {', '.join(missing)}" if missing else f"has files that are not the originals: {error}"
        raise TaskError(
            f"expected {', '.join(files)} in {folder}, which {state}. Set the task's option data_root to the folder"
            " above, or download = true to fetch them"
        ) from error
