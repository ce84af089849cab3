"""Tiny CIFAR folders in the original layout; torchvision's digests are replaced by those of their files."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_tasks import load_task
from fl_tasks.torchvision_compat import import_torchvision


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch, each: int = 1) -> Path:
    """Six batches of `each` images: one is black and labelled 1 to 6, more are random. Returns the folder."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    entries = []
    generator = torch.Generator().manual_seed(1)
    for number, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], start=1):
        images, labels = torch.zeros(1, 3072, dtype=torch.uint8), [number]
        if each > 1:
            images = torch.randint(256, (each, 3072), dtype=torch.uint8, generator=generator)
            labels = torch.randint(10, (each,), generator=generator).tolist()
        entries.append(written(folder / name, {"data": images.numpy(), "labels": labels}))
    official = import_torchvision().datasets.CIFAR10
    monkeypatch.setattr(official, "train_list", entries[:5])
    monkeypatch.setattr(official, "test_list", entries[5:])
    return folder


def written(path: Path, content: object) -> list[str]:
    """The name and the MD5 of a file that now has the content, pickled as the original files are."""
    data = pickle.dumps(content, protocol=4)
    path.write_bytes(data)
    return [path.name, hashlib.md5(data, usedforsecurity=False).hexdigest()]


def load(name: str, options: dict[str, object] | None = None) -> Any:
    """A built-in task. Its data are Examples, which the type of a task does not show."""
    return load_task(name, options or {})
