"""CIFAR-10 as arrays that every library can read: written once, from a torchvision folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fl_tasks.built_in.vision_files import cifar10, cifar10_holds_out_batch_5

FOLDER = Path(__file__).parents[2] / "build" / "simulation" / "cifar10"


def stored(root: Path) -> Path:
    """The folder of the arrays of a torchvision folder; "random" stays. Raises TaskError if CIFAR-10 is not there.

    Without the official test batch all five batches are for training, and batch 5 is also for the evaluation. Its
    accuracy then tests only that the contenders train the same, and takes the same time.
    """
    if str(root) == "random" or (FOLDER / "eval_labels.npy").exists():
        return root if str(root) == "random" else FOLDER
    train, held_out = cifar10(root, True, False), cifar10(root, False, False)
    if cifar10_holds_out_batch_5(root):
        train = torch.cat([train[0], held_out[0]]), torch.cat([train[1], held_out[1]])
    FOLDER.mkdir(parents=True, exist_ok=True)
    arrays = (*train, *held_out)
    for name, array in zip(("images", "labels", "eval_images", "eval_labels"), arrays, strict=True):
        np.save(FOLDER / f"{name}.npy", array.contiguous().numpy())
    return FOLDER
