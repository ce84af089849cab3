"""Reads the files of CIFAR-10 and CIFAR-100. They are pickles, and a pickle can name any function to be called.

So the bytes of a file are read once, their digest is compared with the published one, and the same bytes are parsed by
an unpickler that builds dicts, lists, numbers, texts and a record of an array, and calls nothing else.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
