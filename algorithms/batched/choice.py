"""The strategy for a model: which ones can compute it, and which one is the fastest here; the memory of one client.

The fastest one depends on model, device, batch size and number of clients, so it is measured with the clients' own
first batches, on CUDA as it is recorded. Strategies differ in the last bits of their sums. So a run with a measured
choice has the same bits again only if the choice is the same; a named strategy is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from algorithms.batched import stacked
from algorithms.batched.batches import StepBatches, copies_of_first, fillable
from algorithms.batched.modules import CountedNumbers, Numbers, OwnNumbers, RandomStream
from algorithms.batched.recording import NotRecorded, Recorder, Step
from algorithms.batched.strategies import Holder, Inputs, Name, OneByOne, Strategy, Together, losses_of_examples
from algorithms.batches import Batch, examples_of, leaves, to_device
from algorithms.client import LocalData
from algorithms.gradients import Loss
from algorithms.model_state import trainable_views
from algorithms.outside_code import is_interrupt
from algorithms.parameters import AlgorithmError

NAMES: tuple[Name, ...] = ("grouped", "one_by_one", "streams")
REPEATS = 3


class WrongStrategy(AlgorithmError):
    """The wanted strategy cannot compute the model."""


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


def choose(  # noqa: PLR0913, PLR0917 - model, data and batches are one view of a task
    model: nn.Module,
    data: LocalData,
    batches: StepBatches,
    clock: Callable[[], float],
    wanted: Name | None = None,
) -> Choice:
    """The wanted strategy, or the fastest one for these batches.

    data: of any of the clients, for its loss and forward pass; its batches are not read. batches: the first ones of a
    group, on the model's device. clock: seconds, after all work of the device is done. torch's default generators and
    the model's mode are changed. On CUDA a strategy's time is that of its recorded pass, where it can be recorded.

    Raises:
        WrongStrategy: the wanted strategy cannot compute the model.
        Exception: no strategy can, because the task's code raised this error.
    """
    model.train()
    holder = Holder(model, data.forward)
    facts = _facts(model, holder, data, batches.of_client(batches.sizes.index(max(batches.sizes))))
    strategies = {
        name: make_strategy(name, holder, data.loss, fills=facts.fills) for name in _candidates(model, wanted)
    }
    trial, possible, errors = _Trial(model, batches), dict[Name, Step](), dict[str, BaseException]()
    for name, strategy in strategies.items():
        try:
            possible[name] = trial.pass_of(strategy)
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
        why = "; ".join(impossible.values())
        raise WrongStrategy(f"--strategy {wanted}: expected a model that it can compute, got {why}")
    if len(possible) == 1:
        name = next(iter(possible))
        return Choice(name, strategies[name], facts, {}, impossible)
    # Alternating, so that other work of the machine slows down all of them.
    found = [{name: _seconds(play, clock) for name, play in possible.items()} for _ in range(REPEATS)]
    seconds = {name: min(times[name] for times in found) for name in possible}
    fastest = min(possible, key=lambda name: seconds[name])
    return Choice(fastest, strategies[fastest], facts, seconds, impossible)


class _Trial:
    """Passes of all clients from the model's values, which change nothing."""

    def __init__(self, model: nn.Module, batches: StepBatches) -> None:
        views, clients = trainable_views(model), len(batches.sizes)
        self._parameters = {name: tensor.requires_grad_() for name, tensor in stacked.repeated(views, clients).items()}
        self._buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
        self._device, self._batches = next(iter(views.values())).device, batches
        self._numbers: Numbers = (
            CountedNumbers.of_seeds(range(clients), self._device)
            if self._device.type == "cuda"
            else OwnNumbers([RandomStream(self._device, 0) for _ in range(clients)])
        )
        self._recorder = Recorder(self._device)
        self._kept: list[Inputs] = []
        """What the recorded passes work on."""

    def pass_of(self, strategy: Strategy) -> Step:
        """A pass that was made once, recorded on CUDA if that is possible. Raises what the pass raises."""
        buffers = stacked.repeated(self._buffers, len(self._batches.sizes))
        inputs = Inputs(self._parameters, buffers, self._batches, self._numbers)

        def make() -> None:
            strategy.compute(inputs)

        make()
        with suppress(NotRecorded):
            self._kept.append(inputs)
            return self._recorder.record(make, []) if self._device.type == "cuda" else make
        return make


def _seconds(play: Step, clock: Callable[[], float]) -> float:
    before = clock()
    play()
    return clock() - before


def _candidates(model: nn.Module, wanted: Name | None) -> tuple[Name, ...]:
    """A CPU has no streams."""
    if wanted is not None:
        return (wanted,)
    return tuple(name for name in NAMES if name != "streams" or next(model.parameters()).is_cuda)


def make_strategy(name: Name, holder: Holder, loss: Loss, *, fills: bool) -> Strategy:
    """The strategy of this name. fills: as in Facts."""
    if name == "grouped":
        return Together(holder, loss, fill=fills)
    return OneByOne(holder, loss, streams=name == "streams")


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
    return holder.call({name: buffer.detach().clone() for name, buffer in model.named_buffers()}, batch)


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
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        # Kept until the hooks end, so that no memory is used, and counted, twice.
        loss = data.loss(*data.forward(model, to_device(batch, device)))
    del loss
    size = sum(tensor.numel() * max(4, tensor.element_size()) for tensor in trainable_views(model).values())
    return _STACKS * size + _PASSES * sum(saved.values())
