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

from torch import Tensor, nn

from fl_tasks.base import Classifier, Examples, Shard, TaskError
from fl_tasks.built_in.transforms import FlipAndCrop, FlipAndCut, Normalise
from fl_tasks.built_in.vision_files import (
    Images,
    cifar10,
    cifar10_holds_out_batch_5,
    cifar100,
    emnist,
    emnist_labels,
    fashion_mnist,
)
from fl_tasks.data.examples import checked_fraction, split_shard
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
    client_eval_fraction: share of each shard, in [0, 1), that is held out for evaluation on clients.
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
    own_options = ("data_root", "download")

    def __init__(
        self, data_root: str = "data", download: bool = False, model: str = "cnn", client_eval_fraction: float = 0.0
    ) -> None:
        if model not in self.MODELS:
            raise TaskError(f'expected the option model to be one of {", ".join(self.MODELS)}, got "{model}"')
        if not isinstance(download, bool):
            raise TaskError(f"expected the option download to be true or false, got {download!r}")
        self.data_root = Path(data_root).expanduser()
        self.download = download
        self.client_eval_fraction = checked_fraction(client_eval_fraction)
        self._model = self.MODELS[model]
        self._augment = self.AUGMENTS.get(model)
        self._kept: dict[bool, Images] | None = None

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
        """The held-out images, or a shard's own held-out part, in the same form."""
        return self._examples(self._images(train=False)) if shard is None else self._shard_parts(shard)[1]

    def train_labels(self) -> Tensor:
        """Labels of the whole training set, without its images."""
        return self._images(train=True)[1]

    @abstractmethod
    def _read(self, train: bool) -> Images:
        """All images of the training or the held-out set."""

    def _images(self, train: bool) -> Images:
        if self._kept is None:
            return self._read(train)
        if train not in self._kept:
            self._kept[train] = self._read(train)
        return self._kept[train]

    def _shard_parts(self, shard: Shard) -> tuple[Examples, Examples]:
        whole = replace(self._examples(self._images(train=True)), augment=self._augment)
        return split_shard(shard.of(whole), self.client_eval_fraction)

    def _examples(self, images: Images) -> Examples:
        return Examples(*images, prepare=Normalise(self.MEAN, self.STD))


class FashionMnist(Vision):
    """Fashion-MNIST (Xiao et al., 2017): ten kinds of clothes, [n, 1, 28, 28], 60,000 training images."""

    MODELS = MappingProxyType({"cnn": grey_cnn, "cnn-small": grey_cnn_small})
    MEAN, STD = (0.2860,), (0.3530,)
    classes = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
    held_out = "the official test set, 10,000 images"

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
    held_out = "the official test set of the split by class, 116,323 images"

    def train_labels(self) -> Tensor:
        """Labels of the whole training set, without its images, which take 547 MB."""
        return emnist_labels(self.data_root, self.SPLIT, self.download)

    def _read(self, train: bool) -> Images:
        return emnist(self.data_root, self.SPLIT, train, self.download)


class EmnistDigits(Emnist):
    """The digits of EMNIST: 24,000 training images of each."""

    SPLIT = "digits"
    num_classes = 10
    classes = tuple(digits)
    held_out = "the official test set of the digits, 40,000 images"


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

    @property
    def held_out(self) -> str:
        """Description of `eval_data(None)`, for logs and results."""
        if cifar10_holds_out_batch_5(self.data_root):
            return "training batch 5, 10,000 images, NOT the official test set; trained on batches 1 to 4"
        return "the official test set, 10,000 images"

    def _read(self, train: bool) -> Images:
        return cifar10(self.data_root, train, self.download)


class Cifar100(Cifar):
    """CIFAR-100 (Krizhevsky, 2009): a hundred classes with 500 training images each."""

    MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    num_classes = 100
    held_out = "the official test set, 10,000 images"

    def _read(self, train: bool) -> Images:
        return cifar100(self.data_root, train, self.download)
