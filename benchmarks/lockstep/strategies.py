"""Time of a cohort's local steps by strategy, relative to the clients one after the other, alternating in one process.

python -m benchmarks.lockstep.strategies [--rounds 5] [--groups 10,50] [--device cpu]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

import algorithms as fl
from algorithms.batched.choice import NAMES, Facts, make_strategy
from algorithms.batched.client import answer_together
from algorithms.batched.members import Members
from algorithms.batched.modules import RandomStream
from algorithms.batched.strategies import Holder, Name, Strategy
from algorithms.batched.training import Training
from algorithms.batches import forward_pair
from fl_common.allocator import keep_freed_memory
from fl_tasks import Examples
from fl_tasks.batches import batches, count_steps
from fl_tasks.models import grey_cnn_small


def two_layer_cnn() -> nn.Module:
    """For [n, 3, 32, 32]: 3x3 convolutions of 32 and 64 channels, each pooled, 2304-64-10."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2304, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def two_linear_layers() -> nn.Module:
    """For [n, 1, 28, 28]: 784-64-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Setting:
    """A cohort. The images are random numbers: the time does not depend on them."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    examples: int
    batch: int
    epochs: int = 1

    def data(self, seed: int, device: torch.device) -> Examples:
        """One client's examples."""
        random = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.examples, *self.shape, generator=random)
        return Examples(inputs, torch.randint(10, (self.examples,), generator=random)).to(device)


SETTINGS = (
    Setting("Fashion-MNIST, cnn-small, 10 clients, 24 steps of 25", grey_cnn_small, (1, 28, 28), 10, 600, 25),
    Setting("CIFAR-10, two-layer CNN, 50 clients, 5 steps of 10", two_layer_cnn, (3, 32, 32), 50, 50, 10),
    Setting("Fashion-MNIST, 784-64-10, 50 clients, 5 steps of 10", two_linear_layers, (1, 28, 28), 50, 50, 10),
)


class Cohort:
    """The clients of a setting."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self._setting, self._device = setting, device
        self._data = [setting.data(seed, device) for seed in range(setting.clients)]
        self._model = setting.model().to(device)
        self._start = fl.read_state(self._model)
        algorithm = fl.build("fedcm")
        direction = algorithm.direction(algorithm.init(self._start.trainable))
        self._work = fl.Work(algorithm, fl.ClientContext(direction), fl.LocalSettings(0.05))

    def alone(self) -> None:
        """One client after the other."""
        for data in self._members():
            fl.load_state(self._model, self._start)
            fl.answer(self._model, data, self._work)

    def together(self, name: Name, group: int) -> None:
        """In groups of so many clients."""
        fl.load_state(self._model, self._start)
        members, training = (
            [*self._members()],
            Training(self._strategy(name), Facts(False, True, True), time.thread_time),
        )
        for start in range(0, len(members), group):
            some = members[start : start + group]
            streams = [RandomStream(self._device, start + number) for number in range(len(some))]
            answer_together(self._model, Members.drawn(some, [self._work] * len(some), streams), training)

    def _strategy(self, name: Name) -> Strategy:
        return make_strategy(name, Holder(self._model, forward_pair), functional.cross_entropy, fills=True)

    def _members(self) -> Iterator[fl.LocalData]:
        one = self._setting
        steps = count_steps(one.examples, one.batch, epochs=one.epochs)
        for seed, data in enumerate(self._data):
            yield fl.LocalData(batches(data, one.batch, seed, epochs=one.epochs), [], _loss, steps=steps)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done the work; on a CPU of this process, so that other work does not count."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    before = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - before


def measure(setting: Setting, groups: list[int], rounds: int, device: torch.device) -> None:
    """Print a line for each strategy and size of groups: the median of the ratios, the smallest and the largest."""
    cohort = Cohort(setting, device)
    names = [name for name in NAMES if device.type == "cuda" or name != "streams"]
    cases = [(name, group) for name in names for group in groups if group <= setting.clients]
    works: dict[tuple[Name, int], Callable[[], object]] = {case: partial(cohort.together, *case) for case in cases}
    ratios: dict[tuple[Name, int], list[float]] = {case: [] for case in cases}
    alone: list[float] = []
    seconds(cohort.alone, device)
    for number in range(rounds + 1):
        for case, work in works.items():
            before, found = seconds(cohort.alone, device), seconds(work, device)
            if number:  # the first ones allocate memory and load kernels
                alone.append(before)
                ratios[case].append(before / found)
    print(f"{setting.name}: one after the other {median(alone):.3f} s")
    for (name, group), ratio in ratios.items():
        spread = f"{min(ratio):.2f} to {max(ratio):.2f}"
        print(f"    {name:10} groups of {group:3}   {median(ratio):.2f} times as fast ({spread})")


def main() -> None:
    """Measure all settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", default="5,10,50", help="Clients of a group.")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    for setting in SETTINGS:
        measure(setting, [int(part) for part in given.groups.split(",")], given.rounds, torch.device(given.device))


if __name__ == "__main__":
    main()
