"""Image tasks with torchvision's data sets: Fashion-MNIST, EMNIST and CIFAR."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_tasks.base import Classifier, Examples, Shard, TaskError
from fl_tasks.built_in.image_blocks import rows_of
from fl_tasks.built_in.options import chosen_model, part_of_one, true_or_false, whole_number
from fl_tasks.built_in.transforms import FlipAndCrop, FlipAndCut, Normalise
from fl_tasks.built_in.vision_files import (
    Images,
    cifar10,
    cifar10_holds_out_batch_5,
    cifar100,
    emnist,
    emnist_labels,
    fashion_mnist,
    lacks_official_test,
)
from fl_tasks.data.examples import checked_fraction, split_shard
from fl_tasks.data.seeds import random_order
from fl_tasks.models import (
    PreActResNet18,
    ResNet18,
    colour_cnn_small,
    emnist_cnn,
    femnist_cnn,
    grey_cnn,
    grey_cnn_small,
    lenet,
    tutorial_cnn,
)

Augment = Callable[[Tensor], Tensor]
NO_AUGMENTS: Mapping[str, Augment] = MappingProxyType({})


class Vision(Classifier, ABC):
    """The common part of the image tasks. Data is read when it is needed, and only the requested shard is kept.

    data_root: a torchvision folder. download: fetch missing files. model: one of MODELS.
    client_eval_fraction: share of each shard, in [0, 1), that is held out for evaluation on clients; evenly spaced in
    the shard, or drawn by client_eval_seed. augment: false trains on the images as they are.
    pooled: the training set has the test images behind its own, and the server has no example to evaluate on.
    share: train on this share of the training set, drawn by share_seed.
    """

    MODELS: ClassVar[Mapping[str, Callable[[int], nn.Module]]]
    """Values of the option model -> builder, which takes the number of classes."""
    AUGMENTS: ClassVar[Mapping[str, Augment]] = NO_AUGMENTS
    """Augmentation of the training images by model; none for models that are not listed."""
    MEAN: ClassVar[tuple[float, ...]]
    STD: ClassVar[tuple[float, ...]]
    num_classes: int = 10
    classes: ClassVar[tuple[str, ...]] = ()
    """Names of the classes in the order of their numbers. Empty: they are numbers only."""
    OFFICIAL: ClassVar[str]
    """Description of the test set, for logs and results."""
    own_options = ("data_root", "download")

    def __init__(  # noqa: PLR0913 - the task's options
        self,
        data_root: str = "data",
        download: bool = False,
        model: str = "cnn",
        client_eval_fraction: float = 0.0,
        *,
        client_eval_seed: int | None = None,
        augment: bool = True,
        pooled: bool = False,
        share: float = 1.0,
        share_seed: int = 0,
    ) -> None:
        self.data_root = Path(data_root).expanduser()
        self.download = true_or_false("download", download)
        self.client_eval_fraction = checked_fraction(client_eval_fraction)
        self.client_eval_seed = None if client_eval_seed is None else whole_number("client_eval_seed", client_eval_seed)
        self.pooled = true_or_false("pooled", pooled)
        if pooled and not client_eval_fraction:
            raise TaskError("the option pooled leaves no example to evaluate on: set client_eval_fraction, such as 0.2")
        self.share, self.share_seed = part_of_one("share", share), whole_number("share_seed", share_seed)
        self._model = chosen_model(self.MODELS, model)
        self._augment = self.AUGMENTS.get(model) if true_or_false("augment", augment) else None
        self._kept: dict[bool, Images] | None = None

    @property
    def held_out(self) -> str:
        """Description of `eval_data(None)`, for logs and results."""
        if self.pooled:
            share = f"{self.client_eval_fraction:g} of its own images"
            return f"no image: training and test images are pooled, and each client holds out {share}"
        return self.OFFICIAL

    def keep_files(self, keep: bool = True) -> None:
        """Read each file once from now on and keep its bytes, for a process that asks for many shards; or forget it."""
        self._kept = (self._kept or {}) if keep else None

    def model(self) -> nn.Module:
        """A new model of the kind in the option model."""
        return self._model(self.num_classes)

    def train_data(self, shard: Shard) -> Examples:
        """The shard without its held-out part: bytes, which are normalised batch by batch."""
        return self._shard_parts(shard)[0]

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The test images, of which there are none if they are pooled, or a shard's own held-out part."""
        if shard is not None:
            return self._shard_parts(shard)[1]
        return self._whole()[:0] if self.pooled else self._examples(self._images(train=False))

    def train_labels(self) -> Tensor:
        """Labels of the whole training set, without its images."""
        return self._images(train=True)[1]

    @abstractmethod
    def _read(self, train: bool) -> Images:
        """All images of the training or the held-out set."""

    def _images(self, train: bool) -> Images:
        if self._kept is None:
            return self._read_all(train)
        if train not in self._kept:
            self._kept[train] = self._read_all(train)
        return self._kept[train]

    def _read_all(self, train: bool) -> Images:
        """The images by the options pooled and share."""
        if not train or not (self.pooled or self.share < 1):
            return self._read(train)
        parts = [self._read(part) for part in self._trained_on()]
        labels = torch.cat([part for _, part in parts])
        rows = self._shared_rows(len(labels))
        return rows_of([images for images, _ in parts], rows), labels[rows]

    def _trained_on(self) -> list[bool]:
        """The parts of the training set: true for the training images, false for the test images."""
        return [True, False] if self.pooled else [True]

    def _shared_rows(self, total: int) -> Tensor:
        """The examples of the option share: all, or the first floor(share * total) of a random order."""
        if self.share == 1:
            return torch.arange(total)
        drawn = random_order(self.share_seed, torch.arange(total))[: int(self.share * total)]
        return drawn.sort().values

    def _whole(self) -> Examples:
        return replace(self._examples(self._images(train=True)), augment=self._augment)

    def _shard_parts(self, shard: Shard) -> tuple[Examples, Examples]:
        examples = shard.of(self._whole())
        order = None
        if self.client_eval_seed is not None:
            indices = torch.arange(len(examples)) if shard.indices is None else shard.indices
            order = random_order(self.client_eval_seed, indices)
        return split_shard(examples, self.client_eval_fraction, order)

    def _examples(self, images: Images) -> Examples:
        return Examples(*images, prepare=Normalise(self.MEAN, self.STD))


class FashionMnist(Vision):
    """Fashion-MNIST (Xiao et al., 2017): ten kinds of clothes, [n, 1, 28, 28], 60,000 training images."""

    MODELS = MappingProxyType({"cnn": grey_cnn, "cnn-small": grey_cnn_small})
    MEAN, STD = (0.2860,), (0.3530,)
    classes = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
    OFFICIAL = "the official test set, 10,000 images"

    def _read(self, train: bool) -> Images:
        return fashion_mnist(self.data_root, train, self.download)


class Emnist(Vision):
    """EMNIST (Cohen et al., 2017), split by class: digits and letters, upright, [n, 1, 28, 28], pixels from 0 to 1.

    697,932 training images, 116,323 held out; the class sizes differ widely.
    """

    MODELS = MappingProxyType({"cnn": emnist_cnn, "leaf-cnn": femnist_cnn})
    MEAN, STD = (0.0,), (1.0,)
    SPLIT = "byclass"
    num_classes = 62
    classes = tuple(digits + ascii_uppercase + ascii_lowercase)
    OFFICIAL = "the official test set of the split by class, 116,323 images"

    def train_labels(self) -> Tensor:
        """Labels of the whole training set, without its images, which take 547 MB."""
        parts = [emnist_labels(self.data_root, self.SPLIT, train, self.download) for train in self._trained_on()]
        labels = torch.cat(parts)
        return labels[self._shared_rows(len(labels))]

    def _read(self, train: bool) -> Images:
        return emnist(self.data_root, self.SPLIT, train, self.download)


class EmnistDigits(Emnist):
    """The digits of EMNIST: 24,000 training images of each."""

    SPLIT = "digits"
    num_classes = 10
    classes = tuple(digits)
    OFFICIAL = "the official test set of the digits, 40,000 images"


class Cifar(Vision, ABC):
    """The common part of the CIFAR tasks: [n, 3, 32, 32], mirrored and cropped at random in training.

    Models whose names end in -24 train on random 24x24 crops and are evaluated on the centre crop.
    """

    MODELS = MappingProxyType(
        {
            "cnn": lenet,
            "cnn-small": colour_cnn_small,
            "cnn-24": tutorial_cnn,
            "resnet18-gn": ResNet18,
            "resnet18-gn-cifar": partial(ResNet18, cifar_stem=True),
            "resnet18-preact-24": PreActResNet18,
        }
    )
    AUGMENTS = MappingProxyType({name: FlipAndCut() if name.endswith("-24") else FlipAndCrop() for name in MODELS})


class Cifar10(Cifar):
    """CIFAR-10 (Krizhevsky, 2009): ten classes.

    In a folder without the official test batch, batch 5 is held out and the 40,000 images of batches 1 to 4 are the
    training set. `held_out` states which of the two applies.
    """

    MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    OFFICIAL = "the official test set, 10,000 images"

    @property
    def held_out(self) -> str:
        """Description of `eval_data(None)`, for logs and results."""
        if not self.pooled and cifar10_holds_out_batch_5(self.data_root):
            return "training batch 5, 10,000 images, NOT the official test set; trained on batches 1 to 4"
        return super().held_out

    def _read(self, train: bool) -> Images:
        if self.pooled and cifar10_holds_out_batch_5(self.data_root):
            raise TaskError(lacks_official_test(self.data_root))
        return cifar10(self.data_root, train, self.download)


class Cifar100(Cifar):
    """CIFAR-100 (Krizhevsky, 2009): a hundred classes with 500 training images each."""

    MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    num_classes = 100
    OFFICIAL = "the official test set, 10,000 images"

    def _read(self, train: bool) -> Images:
        return cifar100(self.data_root, train, self.download)
