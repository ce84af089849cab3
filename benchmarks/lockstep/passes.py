"""Time of one forward and backward pass of a cohort on a GPU, as it is recorded, by strategy and form of convolution.

    python -m benchmarks.lockstep.passes                                  # all networks and forms
    python -m benchmarks.lockstep.passes --only ResNet-18-GN --profile    # and the slowest kernels of each

The engine has the form "convolution" of every strategy. The others are tried here: convolutions as one product of
matrices for each client, cuDNN's search for the fastest kernels, and factors of 10 bits. Prints a JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from algorithms.batched import stacked
from algorithms.batched.batches import StepBatches
from algorithms.batched.choice import NAMES, make_strategy
from algorithms.batched.modules import CountedNumbers
from algorithms.batched.recording import Recorder
from algorithms.batched.strategies import Holder, Inputs, Name
from algorithms.batches import forward_pair
from algorithms.model_state import trainable_views
from benchmarks.lockstep.rounds import SETTINGS, SHAPE

DEVICE = torch.device("cuda")
REPEATS = 3
KERNELS = 20
"""Lines of a profile."""
Convolution = Callable[[nn.Conv2d, Tensor], Tensor]


def unfolded(module: nn.Conv2d, images: Tensor) -> Tensor:
    """The convolution as a product of its weights with torch's unfolded columns."""
    kernel, stride, padding = _sizes(module)
    columns = functional.unfold(images, kernel, 1, padding, stride)
    return _images(module, torch.einsum("ok,nkl->nol", module.weight.flatten(1), columns), images)


def windows(module: nn.Conv2d, images: Tensor) -> Tensor:
    """The convolution as a product of rows, which are windows of the padded images, with its weights."""
    kernel, stride, padding = _sizes(module)
    padded = functional.pad(images, (padding[1], padding[1], padding[0], padding[0])).permute(0, 2, 3, 1)
    seen = padded.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])
    rows = seen.flatten(3).flatten(1, 2)
    return _images(module, (rows @ module.weight.flatten(1).t()).transpose(1, 2), images)


def _images(module: nn.Conv2d, scores: Tensor, images: Tensor) -> Tensor:
    """[n, channels, pixels] -> [n, channels, height, width], with the bias."""
    if module.bias is not None:
        scores = scores + module.bias[:, None]
    sizes = zip(images.shape[-2:], *_sizes(module), strict=True)
    shape = [(size + 2 * pad - kernel) // stride + 1 for size, kernel, stride, pad in sizes]
    made: Tensor = scores.flatten(1).clone().unflatten(1, (-1, *shape))
    return made


def _sizes(module: nn.Conv2d) -> list[tuple[int, int]]:
    """Kernel, stride and padding, each by height and width."""
    return [(int(one[0]), int(one[1])) for one in (module.kernel_size, module.stride, module.padding)]


FORMS: dict[str, Convolution | None] = {"convolution": None, "unfolded": unfolded, "windows": windows}


@dataclass(frozen=True)
class Case:
    """What is measured."""

    network: str
    strategy: Name
    form: str = "convolution"
    searched: bool = False
    """cuDNN searches the fastest kernels."""
    tf32: bool = False


def cases(network: str) -> Iterator[Case]:
    """Strategies and precisions, other forms of a grouped convolution, and strategies with searched kernels."""
    for strategy, tf32 in product(NAMES, (False, True)):
        yield Case(network, strategy, tf32=tf32)
    for form, tf32 in product(FORMS, (False, True)):
        if form != "convolution":
            yield Case(network, "grouped", form, tf32=tf32)
    for strategy in NAMES:
        yield Case(network, strategy, searched=True)


@contextmanager
def changed(model: nn.Module, form: Convolution | None) -> Iterator[None]:
    """The model's convolutions in another form, within the context."""
    modules = [module for module in model.modules() if type(module) is nn.Conv2d] if form else []
    for module in modules:
        if form is not None:
            module.forward = partial(form, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def measure(model: nn.Module, case: Case, *, profiled: bool) -> dict[str, Any]:
    """The shortest time of a pass of all clients on the GPU, and the time to record it."""
    setting = SETTINGS[case.network]
    torch.backends.cudnn.benchmark = case.searched
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.tf32
    images = torch.randn(setting.cohort, setting.batch, *SHAPE, device=DEVICE)
    targets = torch.randint(10, images.shape[:2], device=DEVICE)
    parameters = stacked.repeated(trainable_views(model), setting.cohort)
    inputs = Inputs(
        {name: tensor.requires_grad_() for name, tensor in parameters.items()},
        {},
        StepBatches((images, targets), [setting.batch] * setting.cohort),
        CountedNumbers.of_seeds(range(setting.cohort), DEVICE),
    )
    strategy = make_strategy(case.strategy, Holder(model, forward_pair), functional.cross_entropy, fills=True)
    with changed(model, FORMS[case.form]):
        began = time.perf_counter()
        play = Recorder(DEVICE).record(lambda: strategy.compute(inputs), [])
    play()
    torch.cuda.synchronize()
    made, found = time.perf_counter() - began, []
    for _ in range(REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        play()
        after.record()
        torch.cuda.synchronize()
        found.append(before.elapsed_time(after))
    if profiled:
        with profile(activities=[ProfilerActivity.CUDA]) as kernels:
            play()
            torch.cuda.synchronize()
        print(kernels.key_averages().table("cuda_time_total", row_limit=KERNELS, max_name_column_width=100))
    return {**asdict(case), "ms": round(min(found), 3), "recorded_s": round(made, 2)}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Time of a recorded pass of a cohort on a GPU.")
    parser.add_argument("--only", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    for network in given.only:
        torch.manual_seed(0)
        model = SETTINGS[network].model().to(DEVICE)
        for case in cases(network):
            try:
                line = measure(model, case, profiled=given.profile)
            except RuntimeError as error:  # no memory, or no kernel for this form
                line = {**asdict(case), "failed": str(error).splitlines()[0]}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
