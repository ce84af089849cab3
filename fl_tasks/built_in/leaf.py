"""LEAF's image tasks (Caldas et al., 2018): characters by writer, FEMNIST, and faces by person, CelebA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_tasks.base import Classifier, Examples, Shard, TaskError
from fl_tasks.built_in.faces import cached_faces, images_folder, read_faces
from fl_tasks.built_in.image_blocks import rows_of
from fl_tasks.built_in.leaf_files import (
    TEST,
    TRAIN,
    WHOLE,
    LeafFile,
    is_split,
    leaf_folder,
    read_characters,
    read_names,
)
from fl_tasks.built_in.options import chosen_model, whole_number
from fl_tasks.built_in.transforms import Normalise
from fl_tasks.data.seeds import random_order
from fl_tasks.models import celeba_cnn, emnist_cnn, femnist_cnn, grey_cnn_small

HELD_OUT = 0.1
"""The share of each user's examples, if LEAF has not divided them. It is that of LEAF's own default."""


@dataclass(frozen=True)
class Part:
    """The training or the test examples of the chosen users, which are in rows of LEAF's files."""

    name: str
    """TRAIN or TEST."""
    content: LeafFile
    rows: Tensor
    """The row of each example in the files, int64 [n]."""
    users: Tensor
    """The user of each example by the number among the chosen training users, int64 [n]; -1 for another user."""

    @property
    def labels(self) -> Tensor:
        """The label of each example."""
        return self.content.labels[self.rows]


class Leaf(Classifier, ABC):
    """The common part: a user of the training files is a group of the partition "natural".

    Users are numbered in the order of LEAF's files. A user's test examples are held out on the client that has the
    first of the user's training examples: one client for each user has its user's.

    data_root: LEAF's folder `data`. model: one of MODELS. users: train on so many users only, drawn by users_seed; 0
    for all. user: the only user of this device, such as "f0000_14"; "" for all users.
    """

    NAME: ClassVar[str]
    """The name of LEAF's folder."""
    MODELS: ClassVar[Mapping[str, Callable[[int], nn.Module]]]
    """Values of the option model -> builder, which takes the number of classes."""
    classes: ClassVar[tuple[str, ...]]
    own_options = ("data_root", "user")

    def __init__(  # noqa: PLR0913 - the task's options
        self, data_root: str = "data", *, model: str = "cnn", users: int = 0, users_seed: int = 0, user: str = ""
    ) -> None:
        self.data_root = Path(data_root).expanduser()
        self._model = chosen_model(self.MODELS, model)
        self.users, self.users_seed = whole_number("users", users), whole_number("users_seed", users_seed)
        if self.users and user:
            raise TaskError(f"expected the option users or the option user, got users = {users} and user = {user!r}")
        self.user = user

    @property
    def held_out(self) -> str:
        """Description of `eval_data(None)`, for logs and results."""
        if is_split(leaf_folder(self.data_root, self.NAME)):
            return "the test examples of LEAF's files"
        return "a tenth of each user's examples, because LEAF's files are not divided into train and test"

    def model(self) -> nn.Module:
        """A new model of the kind in the option model."""
        return self._model(len(self.classes))

    def train_data(self, shard: Shard) -> Examples:
        """The training examples of the shard."""
        train = self._parts[0]
        chosen = shard.of(Examples(torch.arange(len(train.rows)), train.labels))
        return self._examples(train, chosen.inputs, chosen.targets)

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """All test examples, or those of the users whose first training example is in the shard."""
        train, test = self._parts
        if shard is None:
            return self._examples(test, torch.arange(len(test.rows)), test.labels)
        chosen = shard.of(Examples(torch.arange(len(train.rows)), train.users)).inputs
        first = torch.searchsorted(train.users, torch.arange(int(train.users[-1]) + 1))
        here = torch.isin(test.users, torch.isin(first, chosen).nonzero().flatten()).nonzero().flatten()
        return self._examples(test, here, test.labels[here])

    def train_labels(self) -> Tensor:
        """Labels of the training examples, without the images."""
        return self._parts[0].labels

    def train_groups(self) -> Tensor:
        """The user of each training example, from 0 in the order of LEAF's files."""
        return self._parts[0].users

    def keep_files(self, keep: bool = True) -> None:
        """Nothing: images are mapped, not read, and a process that asks for many shards needs no more."""

    @abstractmethod
    def _read(self, folder: Path) -> LeafFile:
        """The content of a folder with LEAF's files."""

    @abstractmethod
    def _images(self, part: Part, positions: Tensor) -> Tensor:
        """The images at these positions of a part, as bytes [n, channels, height, width]."""

    def _examples(self, part: Part, positions: Tensor, labels: Tensor) -> Examples:
        images = self._images(part, positions)
        channels = images.shape[1]
        return Examples(images, labels, prepare=Normalise((0.0,) * channels, (1.0,) * channels))

    @cached_property
    def _parts(self) -> tuple[Part, Part]:
        """The training and the test examples. Labels and places are in memory, images are not."""
        folder = leaf_folder(self.data_root, self.NAME)
        if is_split(folder):
            train, test = self._read(folder / TRAIN), self._read(folder / TEST)
            others = dict.fromkeys({*test.users} - {*train.users}, -1)
            number = self._numbers(train)
            return _part(TRAIN, train, number), _part(TEST, test, number | others)
        content = self._read(folder / WHOLE)
        whole = _part(TRAIN, content, self._numbers(content))
        held_out = _held_out(whole)
        test_part = Part(TEST, content, whole.rows[held_out], whole.users[held_out])
        return Part(TRAIN, content, whole.rows[~held_out], whole.users[~held_out]), test_part

    def _numbers(self, content: LeafFile) -> dict[str, int]:
        """The numbers of the chosen users. Raises TaskError for users that are not there."""
        users = [user for user, count in zip(content.users, content.counts.tolist(), strict=True) if count]
        if self.user and self.user not in users:
            raise TaskError(
                f"expected the option user to be one of the {len(users)} users of LEAF's files, such as"
                f" {', '.join(users[:1])}, got {self.user}"
            )
        if not users or self.users > len(users):
            raise TaskError(f"expected {self.users or 1} or more users in LEAF's files, found {len(users)}")
        chosen = [self.user] if self.user else users
        if self.users:
            drawn = random_order(self.users_seed, torch.arange(len(users)))[: self.users]
            chosen = [users[place] for place in drawn.sort().values.tolist()]
        return {user: number for number, user in enumerate(chosen)}


def _part(name: str, content: LeafFile, number: Mapping[str, int]) -> Part:
    """The examples of the users that have a number."""
    missing = -2
    of_row = torch.tensor([number.get(user, missing) for user in content.users]).repeat_interleave(content.counts)
    rows = (of_row != missing).nonzero().flatten()
    return Part(name, content, rows, of_row[rows])


def _held_out(whole: Part) -> Tensor:
    """A mask of about a tenth of each user's examples, drawn by a fixed seed: the first of a random order.

    As in LEAF's own division, a user keeps at least one example to train on, and of two or more one is held out.
    """
    order = random_order(0, whole.rows)
    order = order[whole.users[order].argsort(stable=True)]
    counts = torch.bincount(whole.users)
    kept = ((1 - HELD_OUT) * counts).long().clamp(min=1)
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[whole.users[order]]
    mask = torch.zeros(len(order), dtype=torch.bool)
    mask[order] = place < (counts - kept)[whole.users[order]]
    return mask


class Femnist(Leaf):
    """FEMNIST: characters by writer, [n, 1, 28, 28], pixels from 0 to 1, 62 classes; white is 1.

    Each JSON file is parsed once and kept as bytes in a folder beside it, if that can be written.
    """

    NAME = "femnist"
    MODELS = MappingProxyType(
        {
            "cnn": femnist_cnn,
            "cnn-2028": partial(femnist_cnn, units=2028),
            "cnn-small": grey_cnn_small,
            "emnist-cnn": emnist_cnn,
        }
    )
    classes = tuple(digits + ascii_uppercase + ascii_lowercase)

    def _read(self, folder: Path) -> LeafFile:
        return read_characters(folder, len(self.classes))

    def _images(self, part: Part, positions: Tensor) -> Tensor:
        return rows_of(part.content.images, part.rows[positions])


class CelebA(Leaf):
    """CelebA: whether a person smiles, faces by person, [n, 3, 84, 84], pixels from 0 to 1.

    A device decodes its own images. A simulation decodes all of its users' once and keeps them as bytes in a folder
    beside the images, if that can be written.
    """

    NAME = "celeba"
    MODELS = MappingProxyType(
        {
            "cnn": celeba_cnn,
            "cnn-batch-norm": partial(celeba_cnn, batch_norm=True),
            "cnn-3": partial(celeba_cnn, blocks=3),
        }
    )
    classes = ("not smiling", "smiling")
    _kept: dict[str, list[Tensor]] | None = None
    """The images of the parts in blocks, by name of the part; None: they are decoded when they are needed."""

    def keep_files(self, keep: bool = True) -> None:
        """Decode all images once from now on, for a process that asks for many shards; or forget them."""
        self._kept = (self._kept or {}) if keep else None

    def _read(self, folder: Path) -> LeafFile:
        return read_names(folder, len(self.classes))

    def _images(self, part: Part, positions: Tensor) -> Tensor:
        folder = images_folder(leaf_folder(self.data_root, self.NAME))
        if self._kept is None:
            return read_faces(folder, _names(part, positions))
        if part.name not in self._kept:
            self._kept[part.name] = cached_faces(folder, _names(part, torch.arange(len(part.rows))))
        return rows_of(self._kept[part.name], positions)


def _names(part: Part, positions: Tensor) -> list[str]:
    return [part.content.names[row] for row in part.rows[positions].tolist()]
