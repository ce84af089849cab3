"""The setting that all contenders train: data, model and hyperparameters.

It is the CIFAR-10 benchmark of pfl-research (Granqvist et al., "pfl-research: simulation framework for accelerating
research in Private Federated Learning", 2024; its benchmarks/image_classification/configs/baseline.yaml): 1,000
clients of 50 images, IID, 50 clients a round, FedAvg with the unweighted mean, one local epoch in batches of 10 at rate
0.1, an evaluation every 10 rounds. The images are in the order channel, row, column; its data program reads them as
row, column, channel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLIENTS, IMAGES, EVALUATION_IMAGES = 1000, 50, 10_000
COHORT, BATCH, RATE, EVALUATION_EVERY = 50, 10, 0.1, 10
EVALUATION_BATCH = 128
"""Images of a batch of an evaluation, as in ours on a CPU. pfl-research evaluates 10,000 at once, in 2 GB."""
SEED = 0
CLASSES = 10


@dataclass(frozen=True, slots=True)
class Data:
    """Normalised images [n, 3, 32, 32] and labels [n]: of all clients one after the other, and for the evaluation."""

    inputs: Tensor
    targets: Tensor
    eval_inputs: Tensor
    eval_targets: Tensor

    def client(self, index: int) -> tuple[Tensor, Tensor]:
        """The images and labels of a client, as views."""
        part = slice(index * IMAGES, (index + 1) * IMAGES)
        return self.inputs[part], self.targets[part]


def data_root() -> Path:
    """IMPETUS_DATA, or `../shared/data` beside the repository, as in the tests. Libraries get the arrays' folder."""
    return Path(os.environ.get("IMPETUS_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def load_data(folder: Path) -> Data:
    """CIFAR-10 from the arrays of `stored`. The folder "random" is noise."""
    if str(folder) == "random":
        return _noise()
    names = ("images", "labels", "eval_images", "eval_labels")
    images, labels, held_images, held_labels = (np.load(folder / f"{name}.npy") for name in names)
    order = np.random.default_rng(SEED).permutation(len(images))
    mean, std = _statistics(images)

    def normalised(pixels: np.ndarray[Any, Any]) -> Tensor:
        values = torch.from_numpy(pixels.astype(np.float32))
        scale, shift = (torch.tensor(channels, dtype=torch.float32).view(3, 1, 1) for channels in (std, mean))
        return values.sub_(shift).div_(scale)

    return Data(
        normalised(images[order]),
        torch.from_numpy(labels[order]),
        normalised(held_images),
        torch.from_numpy(held_labels),
    )


def _statistics(images: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Mean and standard deviation of each channel, from counts of the byte values: floats take over a gigabyte."""
    parts = np.array_split(images, 50)
    counts = np.stack([sum(np.bincount(part[:, at].ravel(), minlength=256) for part in parts) for at in range(3)])
    values, total = np.arange(256), counts[0].sum()
    mean = counts @ values / total
    return mean, np.sqrt(counts @ values**2 / total - mean**2)


def _noise() -> Data:
    """Random images and labels in CIFAR-10's sizes: the same speed where there is no data set."""
    made = torch.Generator().manual_seed(SEED)
    images = [torch.randn(count, 3, 32, 32, generator=made) for count in (CLIENTS * IMAGES, EVALUATION_IMAGES)]
    labels = [torch.randint(CLASSES, (len(part),), generator=made) for part in images]
    return Data(images[0], labels[0], images[1], labels[1])


def new_model() -> nn.Module:
    """The "simple CNN" of pfl-research for 32x32 images in 3 channels, 1,626,442 parameters."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(14 * 14 * 64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, CLASSES),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def evaluate(model: nn.Module, data: Data) -> float:
    """The accuracy on the evaluation's images, for contenders without an evaluation of their own."""
    model.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in zip(
            data.eval_inputs.split(EVALUATION_BATCH), data.eval_targets.split(EVALUATION_BATCH), strict=True
        ):
            correct += int((model(inputs).argmax(1) == targets).sum())
    return correct / len(data.eval_targets)
