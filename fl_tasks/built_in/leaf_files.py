"""Reads data sets in LEAF's format (Caldas et al., 2018): JSON files of users, each with inputs `x` and labels `y`.

    {"users": ["f0000_14", ...], "num_samples": [96, ...],
     "user_data": {"f0000_14": {"x": [...], "y": [...]}, ...}}

FEMNIST's x are images of 784 numbers from 0 to 1; a file is parsed once, image by image, and kept as bytes in the cache
beside it. CelebA's x are names of image files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_tasks.built_in.image_blocks import cache_path, load_cached, save_cached
from fl_tasks.built_in.json_stream import JsonStream
from fl_tasks.errors import TaskError

TRAIN, TEST, WHOLE = "train", "test", "all_data"
"""The folders of LEAF's output: after the split into training and test examples, and before it."""

PIXELS = 784
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class LeafFile:
    """The content of one JSON file, or of several, user by user."""

    users: tuple[str, ...]
    counts: Tensor
    """Examples of each user, int64 [users]."""
    labels: Tensor
    """int64 [n]."""
    images: tuple[Tensor, ...] = ()
    """FEMNIST: uint8 [k, 1, 28, 28], together n."""
    names: tuple[str, ...] = ()
    """CelebA: the name of each image's file, n."""


def leaf_folder(root: Path, name: str) -> Path:
    """The folder with LEAF's train and test, or all_data. Raises TaskError.

    root: LEAF's folder `data`, or the folder of the data set in it, or the folder `data` in that.
    """
    tried = [root / name / "data", root / "data", root]
    for folder in tried:
        if any((folder / part).is_dir() for part in (TRAIN, WHOLE)):
            return folder
    came = sorted(path.name for path in root.iterdir())[:8] if root.is_dir() else None
    found = "which does not exist" if came is None else f"which has {', '.join(came) or 'no file'}"
    raise TaskError(
        f"expected LEAF's folders {TRAIN} and {TEST} of {name} in {tried[0]}, {tried[1]} or {root}, {found}. Make them"
        f" with LEAF's data/{name}/preprocess.sh and set the task's option data_root to LEAF's folder data"
    )


def is_split(folder: Path) -> bool:
    """Whether LEAF divided the examples into training and test ones. Raises TaskError if one of the two is missing."""
    if not (folder / TRAIN).is_dir():
        return False
    if not (folder / TEST).is_dir():
        raise TaskError(f"expected the folder {TEST} beside {folder / TRAIN}, found none: copy LEAF's output whole")
    return True


def read_characters(folder: Path, classes: int) -> LeafFile:
    """All files of a folder with images in them, by the order of the files' names. Raises TaskError."""
    return _joined([(path, _cached(path, classes)) for path in _files(folder)], folder)


def read_names(folder: Path, classes: int) -> LeafFile:
    """All files of a folder with names of images in them, by the order of the files' names. Raises TaskError."""
    files = [(path, _read(path, classes)) for path in _files(folder)]
    for path, content in files:
        if content.images:
            raise _unreadable(path, "expected names of image files as x, got images")
    return _joined(files, folder)


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise TaskError(f"expected LEAF's JSON files in {folder}, found none: run LEAF's preprocess.sh again")
    return files


def _cached(path: Path, classes: int) -> LeafFile:
    """The content of a file with images, which is parsed if it is not in the cache."""
    try:
        cached = cache_path(path.parent, path.stem, [path], "FEMNIST, bytes, 1")
    except OSError as error:
        raise _unreadable(path, error) from error
    if (loaded := load_cached(cached)) is not None:
        tensors, texts = loaded
        users = tuple(json.loads(texts["users"]))
        return LeafFile(users, tensors["counts"], tensors["labels"].long(), (tensors["images"],))
    content = _read(path, classes)
    if content.names or not content.images:
        raise _unreadable(path, f"expected images of {PIXELS} numbers as x, got names of image files or none")
    images = torch.cat(content.images)
    tensors = {"counts": content.counts, "labels": content.labels.to(torch.uint8), "images": images}
    if save_cached(cached, tensors, {"users": json.dumps(content.users)}) and (loaded := load_cached(cached)):
        images = loaded[0]["images"]  # mapped, so that the memory of the bytes is free again
    return replace(content, images=(images,))


def _joined(files: Sequence[tuple[Path, LeafFile]], folder: Path) -> LeafFile:
    """One after the other. Raises TaskError for a user of two files."""
    file_of: dict[str, Path] = {}
    for path, content in files:
        for user in content.users:
            if user in file_of:
                raise TaskError(
                    f"expected each user in one file of {folder}, found {user} in {file_of[user].name} and"
                    f" {path.name}: remove the files of an earlier preprocess.sh"
                )
            file_of[user] = path
    contents = [content for _, content in files]
    return LeafFile(
        tuple(file_of),
        torch.cat([content.counts for content in contents]),
        torch.cat([content.labels for content in contents]),
        tuple(block for content in contents for block in content.images),
        tuple(name for content in contents for name in content.names),
    )


def _read(path: Path, classes: int) -> LeafFile:
    """The content of a file, by the order of its list of users."""
    try:
        with path.open(encoding="utf-8") as file:
            head, content = _document(JsonStream(file), classes)
        users = _users(head, content)
    except (OSError, ValueError) as error:  # among them UnicodeDecodeError
        raise _unreadable(path, error) from error
    ordered = [content[user] for user in users]
    return LeafFile(
        users,
        torch.tensor([len(user.labels) for user in ordered]),
        torch.cat([user.labels for user in ordered]),
        tuple(user.images for user in ordered if user.images is not None),
        tuple(name for user in ordered for name in user.names),
    )


def _unreadable(path: Path, error: Exception | str) -> TaskError:
    return TaskError(f"LEAF's file {path} cannot be used: {error}. Copy it again, or run LEAF's preprocess.sh again")


class _User(NamedTuple):
    """One user's examples: images or names."""

    labels: Tensor
    images: Tensor | None
    names: list[str]


def _document(stream: JsonStream, classes: int) -> tuple[dict[str, Any], dict[str, _User]]:
    """Everything but user_data, and the examples of each user."""
    head, content = dict[str, Any](), dict[str, _User]()
    for key in stream.keys():  # noqa: SIM118 - no mapping
        if key != "user_data":
            head[key] = stream.value()
            continue
        for user in stream.keys():  # noqa: SIM118
            if user in content:
                raise ValueError(f"expected each user once, got {user} twice")
            try:
                content[user] = _user(stream, classes)
            except ValueError as error:
                raise ValueError(f"user {user}: {error}") from error
    stream.end()
    return head, content


def _user(stream: JsonStream, classes: int) -> _User:
    labels: Tensor | None = None
    images: Tensor | None = None
    names: list[str] | None = None
    for key in stream.keys():  # noqa: SIM118
        if key == "x":
            images, names = _inputs(stream)
        elif key == "y":
            labels = _labels(stream.value(), classes)
        else:
            stream.value()
    if labels is None or names is None:
        raise ValueError("expected x and y, one of them is missing")
    if len(labels) != (count := len(names) if images is None else len(images)):
        raise ValueError(f"expected as many x as y, got {count} and {len(labels)}")
    return _User(labels, images, names)


def _users(head: dict[str, Any], content: dict[str, _User]) -> tuple[str, ...]:
    """The users in the order of the list `users`. Raises ValueError if list, numbers and examples do not agree."""
    users, counts = head.get("users"), head.get("num_samples")
    if not isinstance(users, list) or not isinstance(counts, list) or not users:
        raise ValueError("expected an object with users, num_samples and user_data")
    if users != list(dict.fromkeys(map(str, users))) or {*users} != content.keys():
        raise ValueError("expected the same users in users and in user_data, each once")
    if counts != (own := [len(content[user].labels) for user in users]):
        wrong = next((at for at, (count, came) in enumerate(zip(counts, own, strict=False)) if count != came), 0)
        raise ValueError(f"expected as many examples as num_samples has, got {own[wrong]} of user {users[wrong]}")
    return tuple(users)


def _labels(values: Any, classes: int) -> Tensor:
    numbers = _numbers(values)
    if numbers.ndim != 1 or not np.isin(numbers, np.arange(classes)).all():
        raise ValueError(f"expected a list of labels from 0 to {classes - 1} as y")
    return torch.from_numpy(numbers.astype(np.int64))


def _inputs(stream: JsonStream) -> tuple[Tensor | None, list[str]]:
    """Images, uint8 [n, 1, 28, 28], and no names; or None and names of image files."""
    rows, names = bytearray(), list[str]()
    for _ in stream.items():
        if isinstance(value := stream.value(), str):
            names.append(value)
        else:
            rows += _bytes_of(value)
    if rows and names:
        raise ValueError("expected images or names of image files as x, got both")
    if any(Path(name).name != name for name in names):
        raise ValueError("expected names of image files without folders as x")
    return (torch.frombuffer(rows, dtype=torch.uint8).view(-1, 1, 28, 28), []) if rows else (None, names)


def _bytes_of(image: Any) -> bytes:
    """The pixels of an image as bytes. LEAF writes each divided by 255, so no bit is lost."""
    numbers = _numbers(image)
    if numbers.shape != (PIXELS,):
        raise ValueError(f"expected images of {PIXELS} numbers as x, got one of shape {list(numbers.shape)}")
    if not ((numbers >= 0) & (numbers <= 1)).all() or np.abs(numbers * 255 - np.rint(numbers * 255)).max() > _TOLERANCE:
        raise ValueError("expected pixels that are whole numbers from 0 to 255, divided by 255")
    return bytes(np.rint(numbers * 255).astype(np.uint8))


def _numbers(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected a list of numbers: {error}") from error
