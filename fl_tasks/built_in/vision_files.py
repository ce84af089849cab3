"""Reads the image data sets' files as bytes. Errors name the missing files and their folder.

The files of CIFAR-10 and CIFAR-100 are pickles, and a pickle can name any function to be called. So the bytes of a file
are read once, their digest is compared with the published one, and the same bytes are parsed by an unpickler that
builds dicts, lists, numbers, texts and a record of an array, and calls nothing else.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_tasks.base import TaskError
from fl_tasks.torchvision_compat import import_torchvision

Images = tuple[Tensor, Tensor]
"""uint8 [n, channels, height, width] and int64 labels [n]."""

UNREADABLE = (RuntimeError, OSError, ValueError, TypeError, AssertionError, LookupError)
"""The exceptions for missing, changed or truncated files."""

CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_OFFICIAL_TEST = "test_batch"

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
    with _mnist_files("FashionMNIST", "train" if train else "t10k", root, download) as (images, labels):
        return _read_images(images).unsqueeze(1), _read_labels(labels)


def cifar10(root: Path, train: bool, download: bool) -> Images:
    """50,000 training or 10,000 test images, [n, 3, 32, 32]; without the test batch, 40,000 and batch 5."""
    official = import_torchvision().datasets.CIFAR10
    folder = root / CIFAR_FOLDER
    names = [name for name, _ in official.train_list]
    with _errors_named(folder, names):
        if download and not all((folder / name).exists() for name in names):
            _fetch_cifar(official, root)
        first, last = official.train_list, official.test_list
        if cifar10_holds_out_batch_5(root):
            first, last = official.train_list[:4], official.train_list[4:]
        return _joined(folder, first if train else last)


def cifar100(root: Path, train: bool, download: bool) -> Images:
    """50,000 training or 10,000 test images, [n, 3, 32, 32], with the hundred fine labels."""
    kind = import_torchvision().datasets.CIFAR100
    folder, files = root / kind.base_folder, ["train", "test"]
    with _errors_named(folder, files):
        if download and not all((folder / name).exists() for name in files):
            _fetch_cifar(kind, root)
        return _joined(folder, kind.train_list if train else kind.test_list)


def emnist(root: Path, split: str, train: bool, download: bool) -> Images:
    """The training or the test images of a split, [n, 1, 28, 28], upright; the files store them transposed."""
    with _emnist_files(root, split, train, download) as (images, labels):
        return _read_images(images).transpose(1, 2).unsqueeze(1), _read_labels(labels)


def emnist_labels(root: Path, split: str, train: bool, download: bool) -> Tensor:
    """The training or the test labels of a split. The images are not read."""
    with _emnist_files(root, split, train, download) as (_, labels):
        return _read_labels(labels)


def cifar10_holds_out_batch_5(root: Path) -> bool:
    """Whether the training batches exist and the official test batch does not."""
    folder = root / CIFAR_FOLDER
    return folder.exists() and not (folder / CIFAR_OFFICIAL_TEST).exists()


def lacks_official_test(root: Path) -> str:
    """What is there and what to do, where the official test batch is needed."""
    folder = root / CIFAR_FOLDER
    there = ", ".join(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))
    return (
        f"the option pooled needs the official test batch {CIFAR_OFFICIAL_TEST} of CIFAR-10 in {folder}, which has"
        f" {there or 'no file'}: put {CIFAR_OFFICIAL_TEST} of the original archive there, or leave out pooled, and"
        " batch 5 is held out"
    )


def _emnist_files(root: Path, split: str, train: bool, download: bool) -> AbstractContextManager[tuple[Path, Path]]:
    return _mnist_files("EMNIST", f"emnist-{split}-{'train' if train else 'test'}", root, download, split)


@contextmanager
def _mnist_files(kind: str, prefix: str, root: Path, download: bool, *split: str) -> Iterator[tuple[Path, Path]]:
    """The files of images and of labels, which are downloaded first if the caller wants it. Errors name them."""
    datasets = import_torchvision().datasets
    folder, files = root / kind / "raw", [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]
    with _errors_named(folder, files):
        if download:
            _fetch_mnist(getattr(datasets, kind), root, *split)
        yield folder / files[0], folder / files[1]


def _read_images(path: Path) -> Tensor:
    images: Tensor = import_torchvision().datasets.mnist.read_image_file(path)
    return images


def _read_labels(path: Path) -> Tensor:
    labels: Tensor = import_torchvision().datasets.mnist.read_label_file(path)
    return labels


def _joined(folder: Path, batches: Sequence[tuple[str, str]]) -> Images:
    """The images of several batches. torchvision's own reader unpickles anything, so the files are parsed here."""
    parts = [read_batch(folder / name, {md5, CIFAR_SHORT_MD5.get(name, md5)}) for name, md5 in batches]
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def _fetch_cifar(kind: Any, root: Path) -> None:
    fetch = import_torchvision().datasets.utils.download_and_extract_archive
    fetch(kind.url, str(root), filename=kind.filename, md5=kind.tgz_md5)


def _fetch_mnist(kind: Any, root: Path, *split: str) -> None:
    """Let torchvision download the files that are missing. It must not read any: its files of old are pickles."""
    reads_nothing = {"_check_legacy_exist": lambda _: False, "_load_data": lambda _: (None, None)}
    # The class needs this name: torchvision derives the folder from it.
    type(kind.__name__, (kind,), reads_nothing)(root, *split, download=True)


@contextmanager
def _errors_named(folder: Path, files: list[str]) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        missing = [name for name in files if not (folder / name).exists()]
        state = f"is missing {', '.join(missing)}" if missing else f"has files that are not the originals: {error}"
        raise TaskError(
            f"expected {', '.join(files)} in {folder}, which {state}. Set the task's option data_root to the folder"
            " above, or download = true to fetch them"
        ) from error


_LARGEST_BYTES = 200_000_000
"""Above the largest file, CIFAR-100's train with 155 MB."""
_PIXELS = (3, 32, 32)


def read_batch(path: Path, digests: Collection[str]) -> tuple[Tensor, Tensor]:
    """Images, uint8 [n, 3, 32, 32], and labels, int64 [n], of a batch; of two kinds of labels, the fine ones.

    digests: MD5 of the accepted files, in hex. Raises OSError, and ValueError for a file that is not one of them.
    """
    with path.open("rb") as file:
        content = file.read(_LARGEST_BYTES + 1)
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()  # the publisher's kind of digest
    if digest not in digests:
        raise ValueError(f"expected {path.name} with the MD5 {' or '.join(digests)}, got {digest}")
    return parse_batch(content)


def parse_batch(content: bytes) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch's bytes, as `read_batch`. Raises ValueError for bytes that are no batch."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="latin1").load()
        labels = torch.tensor(batch["labels"] if "labels" in batch else batch["fine_labels"])
        images = batch["data"].bytes_of(len(labels)).view(-1, *_PIXELS)
    except Exception as error:  # an unpickler raises errors of many types
        raise ValueError(f"expected a batch of CIFAR, got {type(error).__name__}: {error}") from error
    return images, labels


class _Array:
    """What a pickled numpy array states about itself; numpy's own code is not called."""

    def __init__(self, *_: Any) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def bytes_of(self, images: int) -> Tensor:
        """The values of an array of bytes with one row for each image. Raises ValueError for another array."""
        _, shape, dtype, by_columns, values = self._state
        rows = (images, 3072)
        if shape != rows or not isinstance(dtype, _Dtype) or dtype.name not in {"u1", "uint8"} or by_columns:
            raise ValueError(f"expected an array of {rows} bytes, got one of {shape}")
        raw = bytearray(values if isinstance(values, bytes) else values.encode("latin1"))
        if len(raw) != images * 3072:
            raise ValueError(f"expected {images * 3072} bytes of images, got {len(raw)}")
        return torch.frombuffer(raw, dtype=torch.uint8)


class _Dtype:
    """The name of a pickled numpy dtype."""

    def __init__(self, name: str = "", *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """The byte order, which a single byte does not have."""


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # as the original files name it
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    """Builds records of arrays for the names in `_KNOWN`. Other names, and so all other calls, are errors."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name in the file."""
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"the file names {module}.{name}, which no batch of CIFAR does")
        return _KNOWN[module, name]
