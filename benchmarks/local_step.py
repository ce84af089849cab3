"""What a daemon's local epoch costs beside a bare PyTorch SGD loop over the same batches, paired in one run.

    python -m benchmarks.local_step --model resnet18-gn --methods fedavg fedcm --pairs 15

Epochs alternate bare, ours, ours, bare, so that what else the machine does in the meantime meets both alike; a pair's
ratio is ours over bare, by the clock and by the processor time of this process. Prints one JSON line with what was
asked and the machine, and one for each method. It fails if FedAvg's model is not bit for bit that of the bare loop.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

import algorithms as fl
from algorithms import tree
from benchmarks.demo_grid import machine
from fl_client.allocator import keep_freed_memory
from fl_client.config import MemoryFormat, Precision
from fl_client.device import Compute
from tasks import Examples
from tasks.batches import batches, seed_everything
from tasks.models import ResNet18, grey_cnn

METHODS = ("fedavg", "fedcm", "scaffold", "fedprox", "feddyn", "fedsam", "mofedsam", "mime", "fedrobust")
RATE, SEED = 0.01, 1
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the client's share of the data set that the papers train it on, cut among 100 clients."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    examples: int
    batch_size: int


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "small-cnn": Case(grey_cnn, (1, 28, 28), 600, 32),
        "resnet18-gn": Case(ResNet18, (3, 32, 32), 500, 50),
    }
)


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long something took."""

    wall: float
    cpu: float
    """Of this process; with one thread it does not see what else the machine does, but for caches and clocks."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


class Bench:
    """One model and one data set of random numbers, trained by either loop from the same values."""

    def __init__(self, case: Case, device: torch.device, compute: Compute) -> None:
        seed_everything(SEED)
        self.model = compute.prepared(case.model(), device)
        self._start = fl.read_state(self.model)
        self._batch_size = case.batch_size
        inputs = torch.randn(case.examples, *case.shape)
        self.examples = Examples(inputs, torch.randint(0, 10, (case.examples,))).to(device)
        self._noise = tree.map(lambda tensor: 1e-3 * torch.randn_like(tensor), self._start.trainable)

    def bare(self) -> None:
        """The loop as torch's own tutorials write it."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.model.train()
        for inputs, targets in self._batches():
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(self.model(inputs), targets).backward()
            optimizer.step()

    def work(self, method: str) -> fl.Work:
        """What a client is asked for in the exchange that trains; what it was sent and kept is noise, not zero."""
        algorithm = fl.build(method)
        state = algorithm.init(self._start.trainable)
        sums = {name: self._noise for exchange in algorithm.exchanges[:-1] for name in exchange.sums(_ONE, _ROUND)}
        sent = algorithm.exchanges[-1].direction(state, sums)
        kept = dict.fromkeys(algorithm.client_init(self._start.trainable), self._noise)
        context = fl.ClientContext(None if sent is None else self._noise, kept)
        return fl.Work(algorithm, context, fl.LocalSettings(RATE), len(algorithm.exchanges) - 1)

    def ours(self, work: fl.Work) -> None:
        """The same epoch as a daemon trains it: rule, steps and delta."""
        data = fl.LocalData(self._batches(), (), functional.cross_entropy)
        fl.answer(self.model, data, work)

    def timed(self, epoch: Callable[[], None]) -> Seconds:
        """One epoch from the first values, which are put back outside of the time."""
        fl.load_state(self.model, self._start)
        self.model.zero_grad()
        self._wait()
        wall, cpu = time.perf_counter(), time.process_time()
        epoch()
        self._wait()
        return Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self.examples, self._batch_size, SEED, epochs=1)

    def _wait(self) -> None:
        if self.examples.inputs.is_cuda:
            torch.cuda.synchronize()


_ONE = (fl.UpdateInfo("one", 1, 1),)
_ROUND = fl.RoundInfo(0, RATE, rounds=1, population=1, population_examples=1, cohort_size=1)


def measure(bench: Bench, method: str, pairs: int) -> dict[str, Any]:
    """Ratios of `pairs` pairs of two epochs each, after one of either that is not counted."""
    work = bench.work(method)
    bare, ours = bench.bare, lambda: bench.ours(work)
    bench.timed(bare)
    bench.timed(ours)
    taken = []
    for _ in range(pairs):
        first, second, third, fourth = (bench.timed(epoch) for epoch in (bare, ours, ours, bare))
        taken.append((second + third, first + fourth))
    examples = 2 * len(bench.examples)
    return {
        "method": method,
        "wall": _spread([ours.wall / bare.wall for ours, bare in taken]),
        "cpu": _spread([ours.cpu / bare.cpu for ours, bare in taken]),
        "examples_per_s": round(examples / statistics.median(ours.wall for ours, _ in taken)),
        "bare_examples_per_s": round(examples / statistics.median(bare.wall for _, bare in taken)),
    }


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    """The median, its 95 % interval by resampling the pairs, and the extremes."""
    draw = random.Random(SEED)  # noqa: S311 - no secret
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    found = {
        "median": statistics.median(ratios),
        "low": medians[RESAMPLES * 25 // 1000],
        "high": medians[RESAMPLES * 975 // 1000],
        "min": min(ratios),
        "max": max(ratios),
    }
    return {name: round(value, 4) for name, value in found.items()}


def check(bench: Bench) -> None:
    """FedAvg must end where the bare loop ends."""
    bench.timed(bench.bare)
    expected = fl.read_state(bench.model).trainable
    bench.timed(lambda: bench.ours(bench.work("fedavg")))
    different = [name for name, p in bench.model.named_parameters() if not torch.equal(p, expected[name])]
    if different and not bench.examples.inputs.is_cuda:
        raise SystemExit(f"the bare loop and FedAvg end with different values in {different}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one model and print a line for each method."""
    parser = argparse.ArgumentParser(description="A daemon's local epoch beside a bare PyTorch loop.")
    parser.add_argument("--model", choices=tuple(CASES), default="small-cnn")
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=METHODS)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of two epochs each that are measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=get_args(Precision), default="float32")
    parser.add_argument("--memory-format", choices=get_args(MemoryFormat), default="auto")
    parser.add_argument("--stock-allocator", action="store_true", help="both loops without what a daemon asks of glibc")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not asked.stock_allocator:
        keep_freed_memory()
    bench = Bench(CASES[asked.model], torch.device(asked.device), Compute(asked.precision, asked.memory_format))
    check(bench)
    print(json.dumps({**vars(asked), "machine": machine()}), flush=True)
    for method in asked.methods:
        print(json.dumps(measure(bench, method, asked.pairs)), flush=True)


if __name__ == "__main__":
    main()
