"""The time of a daemon's local epoch, compared with a plain PyTorch loop over the same batches.

    python -m benchmarks.local_step --model resnet18-gn --methods fedavg fedcm --pairs 15
    python -m benchmarks.local_step --optimizer adamw --methods fedavg fedprox
    python -m benchmarks.local_step --private --methods fedavg fedcm

With `--private` our loop makes steps of DP-SGD, on the same batches as the bare loop.
With `--optimizer` both loops make their steps with this optimizer; methods that need plain SGD run inexactly.

Epochs alternate bare, ours, ours, bare, so that other load on the machine affects both in the same way. A pair's ratio
is ours over bare, by wall time and by processor time of this process. Prints one JSON line with the options and the
machine, and one for each method. It fails if FedAvg's model is not equal to that of the bare loop bit for bit.
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
from algorithms.optimizers.classes import BUILT_IN
from algorithms.optimizers.federated import with_optimizer
from algorithms.optimizers.spec import OptimizerSpec
from algorithms.privacy.dp_sgd import Privacy
from benchmarks.demo_grid import machine
from fl_client.settings.config import MemoryFormat, Precision
from fl_client.settings.device import Compute
from fl_common.allocator import keep_freed_memory
from fl_common.privacy.secret_stream import SECRET_BYTES, SecretStream
from fl_tasks import Examples
from fl_tasks.batches import batches, seed_everything
from fl_tasks.models import ResNet18, grey_cnn

METHODS = ("fedavg", "fedcm", "scaffold", "fedprox", "feddyn", "fedsam", "mofedsam", "mime", "fedrobust")
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {name: BUILT_IN[name] for name in ("sgd", "adam", "adamw", "lion")}
)
RATE, SEED = 0.01, 1
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and a client's share of the papers' data set for 100 clients."""

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
    """A duration."""

    wall: float
    cpu: float
    """Processor time of this process. With one thread, other load affects it only through caches and clock rates."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


class Bench:
    """One model and one random data set; both loops train from the same initial values."""

    def __init__(self, case: Case, device: torch.device, compute: Compute, optimizer: str = "sgd") -> None:
        """optimizer: one of OPTIMIZERS, for both loops."""
        self._optimizer = optimizer
        seed_everything(SEED)
        self.model = compute.prepared(case.model(), device)
        self._start = fl.read_state(self.model)
        self._batch_size = case.batch_size
        inputs = torch.randn(case.examples, *case.shape)
        self.examples = Examples(inputs, torch.randint(0, 10, (case.examples,))).to(device)
        self._noise = tree.map(lambda tensor: 1e-3 * torch.randn_like(tensor), self._start.trainable)

    def bare(self) -> None:
        """The loop of the PyTorch tutorials."""
        optimizer = OPTIMIZERS[self._optimizer](self.model.parameters(), lr=RATE)
        self.model.train()
        for inputs, targets in self._batches():
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(self.model(inputs), targets).backward()
            optimizer.step()

    def work(self, method: str) -> fl.Work:
        """The work of a client in the exchange that trains. Direction and client state are noise, not zero."""
        algorithm = with_optimizer(fl.build(method), OptimizerSpec(self._optimizer))
        state = algorithm.init(self._start.trainable)
        sums = {name: self._noise for exchange in algorithm.exchanges[:-1] for name in exchange.sums(_ONE, _ROUND)}
        sent = algorithm.exchanges[-1].direction(state, sums)
        kept = dict.fromkeys(algorithm.client_init(self._start.trainable), self._noise)
        context = fl.ClientContext(None if sent is None else self._noise, kept)
        return fl.Work(algorithm, context, fl.LocalSettings(RATE), len(algorithm.exchanges) - 1)

    def ours(self, work: fl.Work, *, private: bool = False) -> None:
        """The same epoch with the daemon's code: rule, steps and delta."""
        rate, size = self._batch_size / len(self.examples), len(self.examples)
        privacy = Privacy(1.0, 1.0, rate, size, SecretStream(bytes(SECRET_BYTES))) if private else None
        data = fl.LocalData(self._batches(), (), functional.cross_entropy, privacy=privacy)
        fl.answer(self.model, data, work)

    def timed(self, epoch: Callable[[], None]) -> Seconds:
        """The duration of one epoch from the initial values; restoring these is not measured."""
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


def measure(bench: Bench, method: str, pairs: int, *, private: bool = False) -> dict[str, Any]:
    """Ratios of `pairs` pairs of two epochs each, after one warm-up epoch of each loop."""
    work = bench.work(method)
    bare, ours = bench.bare, lambda: bench.ours(work, private=private)
    bench.timed(bare)
    bench.timed(ours)
    taken = []
    for _ in range(pairs):
        first, second, third, fourth = (bench.timed(epoch) for epoch in (bare, ours, ours, bare))
        taken.append((second + third, first + fourth))
    examples = 2 * len(bench.examples)
    return {
        "method": method,
        "wall": spread([ours.wall / bare.wall for ours, bare in taken]),
        "cpu": spread([ours.cpu / bare.cpu for ours, bare in taken]),
        "examples_per_s": round(examples / statistics.median(ours.wall for ours, _ in taken)),
        "bare_examples_per_s": round(examples / statistics.median(bare.wall for _, bare in taken)),
    }


def spread(ratios: Sequence[float]) -> dict[str, float]:
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
    """FedAvg must end with the values of the bare loop."""
    bench.timed(bench.bare)
    expected = fl.read_state(bench.model).trainable
    bench.timed(lambda: bench.ours(bench.work("fedavg")))
    different = [name for name, p in bench.model.named_parameters() if not torch.equal(p, expected[name])]
    if different and not bench.examples.inputs.is_cuda:
        raise SystemExit(f"the bare loop and FedAvg end with different values in {different}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one model and print a line for each method."""
    parser = argparse.ArgumentParser(description="A daemon's local epoch compared with a plain PyTorch loop.")
    parser.add_argument("--model", choices=tuple(CASES), default="small-cnn")
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=METHODS)
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd")
    parser.add_argument("--pairs", type=int, default=15, help="number of measured pairs of two epochs each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=get_args(Precision), default="float32")
    parser.add_argument("--memory-format", choices=get_args(MemoryFormat), default="auto")
    parser.add_argument(
        "--stock-allocator", action="store_true", help="run both loops without the daemon's allocator settings"
    )
    parser.add_argument("--private", action="store_true", help="make our loop's steps private")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not options.stock_allocator:
        keep_freed_memory()
    compute = Compute(options.precision, options.memory_format)
    bench = Bench(CASES[options.model], torch.device(options.device), compute, options.optimizer)
    check(bench)
    print(json.dumps({**vars(options), "machine": machine()}), flush=True)
    for method in options.methods:
        print(json.dumps(measure(bench, method, options.pairs, private=options.private)), flush=True)


if __name__ == "__main__":
    main()
