"""Fashion-MNIST with a network whose convolutions are public: adapters of low rank and the last layer are trained.

    python docs/measurements/privacy/adapted_images.py --data-root DIR --out backbone.safetensors

makes the public part, by training on grey CIFAR-10. The task's option `backbone` is that file. Only B of the adapter
is trained, beside a frozen A that is the same for all (FFA-LoRA, Sun et al. 2024): noise in both would be multiplied.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from fl_tasks import Shard
from fl_tasks.base import TaskError
from fl_tasks.batches import batches, seed_everything
from fl_tasks.built_in.vision import Cifar10, FashionMnist
from fl_tasks.data.examples import Examples
from fl_tasks.models import grey_cnn

LAST = "9."
"""The names of the last layer of the network begin so."""


class Adapted(nn.Module):
    """The network of `grey_cnn`: convolutions and hidden layer are frozen, B and the last layer trained."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        network = list(grey_cnn().children())
        self.features, self.hidden, self.last = nn.Sequential(*network[:7]), network[7], network[9]
        self.lora_A, self.lora_B = nn.Linear(512, rank, bias=False), nn.Linear(rank, 128, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.lora_A.weight.copy_(torch.randn(rank, 512, generator=generator) / 512**0.5)
            self.lora_B.weight.zero_()
        for part in (self.features, self.hidden, self.lora_A):
            part.requires_grad_(False)

    def load_public(self, values: dict[str, Tensor]) -> None:
        """Take convolutions and hidden layer from the values of a `grey_cnn`."""
        public = nn.Sequential(*self.features, self.hidden)
        public.load_state_dict({name: tensor for name, tensor in values.items() if not name.startswith(LAST)})

    def forward(self, images: Tensor) -> Tensor:
        """[n, 1, 28, 28] -> [n, 10]."""
        features = self.features(images)
        scores: Tensor = self.last(functional.relu(self.hidden(features) + self.lora_B(self.lora_A(features))))
        return scores


class AdaptedFashionMnist(FashionMnist):
    """Fashion-MNIST as the built-in task has it. backbone: the public part. rank: of the adapter."""

    version = "1"
    own_options = ("data_root", "backbone")

    def __init__(self, data_root: str = "data", backbone: str = "backbone.safetensors", rank: int = 8) -> None:
        super().__init__(data_root)
        self._backbone, self._rank = Path(backbone), int(rank)

    def model(self) -> nn.Module:
        """The network with the public values. Raises TaskError if the file is missing."""
        model = Adapted(self._rank)
        try:
            model.load_public(load_file(self._backbone))
        except OSError as error:
            raise TaskError(f"expected the public part in {self._backbone}, which cannot be read: {error}") from error
        return model


def main() -> None:
    """Train the public part and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(0)
    images = Cifar10(options.data_root, augment=False).train_data(Shard())
    model = grey_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for inputs, targets in batches(_grey(images), 100, 0, epochs=options.epochs):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    save_file(model.state_dict(), options.out)


def _grey(images: Examples) -> Examples:
    """Grey images of 28x28 with mean 0 and deviation 1."""
    grey = images.inputs.float().mean(1, keepdim=True)[..., 2:30, 2:30]
    return Examples((grey - grey.mean()) / grey.std(), images.targets)


if __name__ == "__main__":
    main()
