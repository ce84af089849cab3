"""Tiny data sets in LEAF's exact format, as its preprocess.sh writes them, with images made from a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WRITERS = {"f0000_14": (6, 2), "f0001_41": (3, 1), "f0002_06": (9, 3)}
"""User -> numbers of training and of test examples."""
PERSONS = {"2880": (4, 2), "17": (5, 1), "9999": (3, 3)}


def document(users: Mapping[str, tuple[list[Any], list[Any]]]) -> dict[str, Any]:
    """The content of a file: users with their x and y."""
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


def write_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file as LEAF does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        json.dump(content, file)


def characters(count: int, seed: int) -> tuple[list[list[float]], list[int]]:
    """Images of 784 pixels, each a byte divided by 255, and labels of 62 classes."""
    generator = np.random.default_rng(seed)
    vectors = generator.integers(0, 256, (count, 784)) / 255
    return vectors.tolist(), generator.integers(0, 62, count).tolist()


def write_femnist(root: Path, writers: Mapping[str, tuple[int, int]] = WRITERS, *, split: bool = True) -> str:
    """LEAF's folder `data` with FEMNIST: the first writer in one file, the others in the next one."""
    folder = root / "femnist" / "data"
    parts = {
        part: {user: characters(counts[at], 10 * number + at) for number, (user, counts) in enumerate(writers.items())}
        for at, part in enumerate(("train", "test"))
    }
    if not split:
        parts = {"all_data": parts["train"]}
    for part, users in parts.items():
        for at, names in enumerate((list(users)[:1], list(users)[1:])):
            suffix = f"_niid_1_keep_0_{part}_9" if split else ""
            content = document({name: users[name] for name in names})
            write_file(folder / part / f"all_data_{at}{suffix}.json", content)
    return str(root)


def write_celeba(root: Path, persons: Mapping[str, tuple[int, int]] = PERSONS) -> str:
    """LEAF's folder `data` with CelebA: one file each, and JPEG files of 178x218."""
    folder, number = root / "celeba" / "data", 0
    parts: dict[str, dict[str, tuple[list[str], list[float]]]] = {"train": {}, "test": {}}
    for person, counts in persons.items():
        for part, count in zip(parts, counts, strict=True):
            names = [f"{number + at + 1:06d}.jpg" for at in range(count)]
            number += count
            parts[part][person] = names, [float(int(name[:6]) % 2) for name in names]
    for part, users in parts.items():
        write_file(folder / part / f"all_data_niid_1_keep_5_{part}_9.json", document(users))
    write_faces(folder / "raw" / "img_align_celeba", [f"{at + 1:06d}.jpg" for at in range(number)])
    return str(root)


def write_faces(folder: Path, names: Sequence[str]) -> None:
    """One colour and some noise for each image."""
    folder.mkdir(parents=True)
    for name in names:
        generator = np.random.default_rng(int(name[:6]))
        pixels = generator.integers(0, 200, (1, 1, 3)) + generator.integers(0, 50, (218, 178, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name, quality=95)
