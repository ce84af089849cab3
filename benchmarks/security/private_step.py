"""Cost of the clipped gradients of a step of DP-SGD: ours beside other ways to compute them, and the plain gradient.

    python -m benchmarks.security.private_step [--models small-cnn resnet18-gn] [--rounds 30]

Ours reads the gradients of layers from inputs and output gradients. `torch.func` makes the gradient of each example,
and `convolutions as products` is the same with convolutions by `torch.nn.functional.unfold`. Opacus reads layers by
its hooks. Each computes sum_i clip(g_i) of the same batch, and all must agree.
In each round every way makes one step, in another order. Prints one JSON line for each model: milliseconds of processor
time and the ratio to the plain gradient of the same round, as medians with quartiles. `benchmarks.local_step --private`
measures whole local epochs with noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from algorithms import tree
from algorithms.base import Tensors
from algorithms.batches import forward_pair
from algorithms.privacy.per_example import ClippedGradients, Clipping
from benchmarks.local_step import CASES
from fl_common.allocator import keep_freed_memory

CLIP = 1.0


class _ConvolutionsAsProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.conv2d:
            return func(*args, **(kwargs or {}))
        inputs, weight, bias, stride, padding, dilation, _ = args
        columns = functional.unfold(inputs, weight.shape[2:], dilation, padding, stride)
        high = (inputs.shape[2] + 2 * padding[0] - dilation[0] * (weight.shape[2] - 1) - 1) // stride[0] + 1
        output = (weight.flatten(1) @ columns).unflatten(2, (high, -1))
        return output if bias is None else output + bias[:, None, None]


def by_torch(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensors:
    """The sum by the gradient of each example."""
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def loss(parameters: Tensors, one: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (one[None],)), target[None])

    return _clipped(vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets))


def as_products(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensors:
    """The same, with convolutions as products of matrices."""
    with _ConvolutionsAsProducts():
        return by_torch(model, inputs, targets)


def by_opacus(hooked: nn.Module, inputs: Tensor, targets: Tensor) -> Tensors:
    """The sum by Opacus' hooks. hooked: a GradSampleModule."""
    hooked.zero_grad(set_to_none=True)
    functional.cross_entropy(hooked(inputs), targets).backward()
    return _clipped({name.removeprefix("_module."): vars(p)["grad_sample"] for name, p in hooked.named_parameters()})


def plain(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensors:
    """The gradient of the mean loss."""
    model.zero_grad(set_to_none=True)
    functional.cross_entropy(model(inputs), targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _clipped(gradients: Tensors) -> Tensors:
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    factors = (CLIP / norms).clamp(max=1.0)
    return {name: (factors @ g.flatten(1)).view(g.shape[1:]) for name, g in gradients.items()}


def ways(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Callable[[], Tensors]]:
    """Each way by its name. Opacus is left out if it is not installed."""
    ours = ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(CLIP))
    found: dict[str, Callable[[], Tensors]] = {
        "plain": lambda: plain(model, inputs, targets),
        "ours": lambda: ours.sum((inputs, targets)),
        "convolutions as products": lambda: as_products(model, inputs, targets),
        "torch.func": lambda: by_torch(model, inputs, targets),
    }
    try:
        import opacus  # type: ignore[import-untyped] # noqa: PLC0415 - of the tests' environment
    except ModuleNotFoundError:
        return found
    hooked = opacus.GradSampleModule(another(model))
    hooked.load_state_dict({f"_module.{name}": tensor for name, tensor in model.state_dict().items()})
    return {**found, "Opacus": lambda: by_opacus(hooked, inputs, targets)}


def another(model: nn.Module) -> nn.Module:
    """A new model of the same case."""
    return next(case.model() for case in CASES.values() if str(case.model()) == str(model))


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Times of all ways for a model."""
    case = CASES[name]
    torch.manual_seed(1)
    model, size = case.model(), (case.batch_size, *case.shape)
    found = ways(model, torch.randn(size), torch.randint(0, 10, (case.batch_size,)))
    sums = {way: compute() for way, compute in found.items() if way != "plain"}
    for way, total in sums.items():
        if tree.norm(tree.subtract(total, sums["ours"])) > 1e-2 * tree.norm(total):
            raise SystemExit(f"{way}: expected the sum that ours has")
    taken: dict[str, list[float]] = {way: [] for way in found}
    order = [*found]
    for number in range(rounds):
        shift = number % len(order)
        for way in (*order[shift:], *order[:shift]):
            began = time.process_time()
            found[way]()
            taken[way].append(1e3 * (time.process_time() - began))
    ratios = {
        way: [one / base for one, base in zip(times, taken["plain"], strict=True)] for way, times in taken.items()
    }
    return {
        "model": name,
        "batch": case.batch_size,
        "ms": {way: round(statistics.median(times), 2) for way, times in taken.items()},
        "ratio": {way: [round(q, 2) for q in statistics.quantiles(of, n=4)] for way, of in ratios.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=tuple(CASES), nargs="+", default=["small-cnn"])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.simplefilter("ignore")
    for name in options.models:
        print(json.dumps(measured(name, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
