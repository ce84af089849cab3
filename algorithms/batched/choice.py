"""The strategy for a model: which ones can compute it, and which one is the fastest here; the memory of one client.

The fastest one depends on model, device, batch size and number of clients, so it is measured with the clients' own
first batches. Strategies differ in the last bits of their sums. So a run with a measured choice has the same bits again
only if the choice is the same; a named strategy is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from algorithms.batched import stacked
from algorithms.batched.batches import NotBatched, Separate, copies_of_first, fillable
from algorithms.batched.modules import OwnNumbers, RandomStream, has_convolutions
from algorithms.batched.strategies import Holder, Inputs, Name, OneByOne, Strategy, Together, losses_of_examples
from algorithms.batches import Batch, examples_of, leaves, to_device
from algorithms.client import LocalData
from algorithms.model_state import trainable_views
from algorithms.outside_code import is_interrupt

NAMES: tuple[Name, ...] = ("grouped", "unfolded", "one_by_one")
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Facts:
    """What passes of a batch show of a model and its loss."""

    draws: bool
    """A pass draws random numbers of torch's default generators."""
    fills: bool
    """An output depends on its own example alone and on no random number: shorter batches are filled up."""
    means: bool
    """The loss of a batch is the mean of its examples' losses, too."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy, and how it was chosen."""

    name: Name
    strategy: Strategy
    facts: Facts
    seconds: Mapping[Name, float]
    """The shortest measured time of one step of all clients, by strategy; empty if only one is possible."""
    impossible: Mapping[str, str]
    """Why a strategy cannot compute this model, by strategy."""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1000 * value:.1f} ms a step" for name, value in self.seconds.items())
        reasons = ", ".join(f"{name} is not possible ({why})" for name, why in self.impossible.items())
        return "; ".join(part for part in (f"{self.name}", times, reasons) if part)


def choose(  # noqa: PLR0913, PLR0917 - model, data and batches are one client's view of a task
    model: nn.Module,
    data: LocalData,
    batches: Sequence[Batch],
    clock: Callable[[], float],
    wanted: Name | None = None,
) -> Choice:
    """The wanted strategy, or the fastest one for these batches.

    data: of any of the clients, for its loss and forward pass; its batches are not read. batches: the first batch of
    each client of a group. clock: seconds, after all work of the device is done. torch's default generators and the
    model's mode are changed.

    Raises:
        NotBatched: the wanted strategy cannot compute the model.
        Exception: no strategy can, because the task's code raised this error.
    """
    device = next(model.parameters()).device
    batches = [to_device(batch, device) for batch in batches]
    model.train()
    holder = Holder(model, data.forward)
    facts = _facts(model, holder, data, max(batches, key=examples_of))
    strategies = {name: _make(name, holder, data, fills=facts.fills) for name in _candidates(model, wanted)}
    trial, possible, errors = _Trial(model, batches, clock), list[Name](), dict[str, BaseException]()
    for name, strategy in strategies.items():
        try:
            trial.seconds(strategy)
            possible.append(name)
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:  # torch has no type for what vmap cannot do, and the task may raise anything
            if is_interrupt(error):
                raise
            errors[name] = error
    impossible = {
        name: f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}" for name, error in errors.items()
    }
    if not possible and "one_by_one" in errors:
        raise errors["one_by_one"]
    if not possible:
        raise NotBatched(
            f"expected a model that {' or '.join(strategies)} can compute: {'; '.join(impossible.values())}"
        )
    if len(possible) == 1:
        return Choice(possible[0], strategies[possible[0]], facts, {}, impossible)
    # Alternating, so that other work of the machine slows down all of them.
    found = [{name: trial.seconds(strategies[name]) for name in possible} for _ in range(REPEATS)]
    seconds = {name: min(each[name] for each in found) for name in possible}
    fastest = min(possible, key=lambda name: seconds[name])
    return Choice(fastest, strategies[fastest], facts, seconds, impossible)


class _Trial:
    """Steps of all clients from the model's values, which change nothing."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], clock: Callable[[], float]) -> None:
        views = trainable_views(model)
        self._parameters = {name: each.requires_grad_() for name, each in stacked.repeated(views, len(batches)).items()}
        self._buffers = {name: each.detach() for name, each in model.named_buffers()}
        device = next(iter(views.values())).device
        self._numbers = OwnNumbers([RandomStream(device, 0) for _ in batches])
        self._batches, self._clock = Separate(batches), clock

    def seconds(self, strategy: Strategy) -> float:
        """Seconds of one step."""
        buffers = stacked.repeated(self._buffers, len(self._batches.batches))
        before = self._clock()
        strategy.compute(Inputs(self._parameters, buffers, self._batches, self._numbers))
        return self._clock() - before


def _candidates(model: nn.Module, wanted: Name | None) -> tuple[Name, ...]:
    if wanted is not None:
        return (wanted,)
    return NAMES if has_convolutions(model) else ("grouped", "one_by_one")


def _make(name: Name, holder: Holder, data: LocalData, *, fills: bool) -> Strategy:
    if name == "one_by_one":
        return OneByOne(holder, data.loss)
    return Together(holder, data.loss, unfold=name == "unfolded", fill=fills)


def _facts(model: nn.Module, holder: Holder, data: LocalData, batch: Batch) -> Facts:
    """They are tried with a batch, and with one whose first example is the same.

    The other examples differ, so a batch norm changes the first output.
    """
    device = next(model.parameters()).device
    idle, stream = RandomStream(device, 0), RandomStream(device, 0)
    with idle.use():
        pass
    with stream.use(), torch.no_grad():
        output, target = _passed(model, holder, batch)
        loss = data.loss(output, target)
    before, after = idle.state or (), stream.state or ()
    draws = any(a is not None and b is not None and not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    if draws or not fillable(batch) or examples_of(batch) < 2:
        return Facts(draws, fills=False, means=False)
    with torch.no_grad():
        copied, _ = _passed(model, holder, copies_of_first(batch))
    fills = all(
        isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == examples_of(batch) and torch.equal(leaf[0], one[0])
        for leaf, one in zip(leaves(output), leaves(copied), strict=True)
    )
    try:
        with torch.no_grad():
            means = fills and torch.allclose(loss, losses_of_examples(data.loss, output, target).mean(), rtol=1e-4)
    except BaseException as error:  # torch has no type for what vmap cannot do
        if is_interrupt(error):
            raise
        means = False
    return Facts(draws, fills, means)


def _passed(model: nn.Module, holder: Holder, batch: Batch) -> tuple[object, object]:
    """Output and target. The model's buffers stay."""
    return holder.call({name: each.detach().clone() for name, each in model.named_buffers()}, batch)


_STACKS = 8
"""Stacks of parameters during a step: y, gradients, a second point, the terms of the rule, and their results."""
_PASSES = 2
"""The backward pass holds gradients of activations beside the saved ones."""


def bytes_of_client(model: nn.Module, data: LocalData, batch: Batch) -> int:
    """Bytes for one client's parameters, and for the activations of a batch, from one forward pass.

    data: for its loss and forward pass. torch's default generators and the model's buffers are changed.
    """
    model.train()
    device = next(model.parameters()).device
    parameters = {each.data_ptr() for each in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        # Kept until the hooks end, so that no memory is used, and counted, twice.
        loss = data.loss(*data.forward(model, to_device(batch, device)))
    del loss
    size = sum(each.numel() * max(4, each.element_size()) for each in trainable_views(model).values())
    return _STACKS * size + _PASSES * sum(saved.values())
