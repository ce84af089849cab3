"""The time of a daemon's local epoch over a data set with worker processes, compared with a bare DataLoader loop.

    python -m benchmarks.data_epoch --workers 2 --pairs 9

The data set makes an image of random numbers from a generator and transforms it in each epoch anew, as image files are
decoded and augmented; `--read-ms` sets the time of one example. The bare loop is torch's DataLoader with the same
number of workers, which stay for the next epoch, and plain SGD. Epochs alternate bare, ours, ours, bare. A pair's ratio
is ours over bare, by wall time. Prints one JSON line with options, machine and ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import algorithms as fl
from benchmarks.demo_grid import machine
from benchmarks.local_step import RATE, SEED, spread
from fl_common.allocator import keep_freed_memory
from fl_tasks import Samples
from fl_tasks.batches import batches, seed_everything
from fl_tasks.models import grey_cnn


class Images(Dataset[tuple[Tensor, int]]):
    """Grey images of 28x28, read for `read_ms` each and shifted by random amounts."""

    def __init__(self, count: int, read_ms: float) -> None:
        self._images, self._read_s = torch.randn(count, 1, 28, 28), read_ms / 1000

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        began, image = time.process_time(), self._images[index]
        while time.process_time() - began < self._read_s:  # the processor time of a decoder
            image.mul(1.0)
        across, down = torch.randint(-2, 3, (2,)).tolist()
        return image.roll((across, down), (1, 2)), index % 10


class Bench:
    """One model and one data set; both loops train from the same initial values."""

    def __init__(self, options: argparse.Namespace) -> None:
        seed_everything(SEED)
        self._model, self._batch_size = grey_cnn(), options.batch_size
        self._start = fl.read_state(self._model)
        images: Any = Images(options.examples, options.read_ms)
        self._loader = DataLoader(
            images,
            options.batch_size,
            shuffle=True,
            num_workers=options.workers,
            persistent_workers=options.workers > 0,
            prefetch_factor=2 if options.workers else None,
            multiprocessing_context="forkserver" if options.workers else None,
        )
        self._samples = Samples(images, workers=options.workers)
        self._work = fl.Work(fl.build("fedavg"), fl.ClientContext(None, {}), fl.LocalSettings(RATE))

    def bare(self) -> None:
        """The loop of the PyTorch tutorials."""
        optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)
        self._model.train()
        for inputs, targets in self._loader:
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(self._model(inputs), targets).backward()
            optimizer.step()

    def ours(self) -> None:
        """The same epoch with the daemon's code."""
        local = batches(self._samples, self._batch_size, SEED, epochs=1)
        fl.answer(self._model, fl.LocalData(local, (), functional.cross_entropy), self._work)

    def seconds(self, epoch: Callable[[], None]) -> float:
        """The duration of one epoch from the initial values."""
        fl.load_state(self._model, self._start)
        began = time.perf_counter()
        epoch()
        return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a line."""
    parser = argparse.ArgumentParser(description="A daemon's epoch over a data set compared with a DataLoader loop.")
    parser.add_argument("--examples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--read-ms", type=float, default=0.5, help="processor time of reading one example, in ms")
    parser.add_argument("--pairs", type=int, default=9, help="number of measured pairs of two epochs each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    bench = Bench(options)
    bench.seconds(bench.bare)
    bench.seconds(bench.ours)
    ratios, bare = [], []
    for _ in range(options.pairs):
        first, second, third, fourth = map(bench.seconds, (bench.bare, bench.ours, bench.ours, bench.bare))
        ratios.append((second + third) / (first + fourth))
        bare += [first, fourth]
    facts = {"wall": spread(ratios), "bare_s": round(statistics.median(bare), 3), "machine": machine()}
    print(json.dumps({**vars(options), **facts}), flush=True)


if __name__ == "__main__":
    main()
