"""A client's part in one exchange, for every method: compute the payloads.

context = ClientContext(direction, state)               state: the last one, or algorithm.client_init(x)
update  = answer(model, data, Work(algorithm, context, settings))
state   = algorithm.next_client_state(context, update.admitted(clip_factor))        when the round has counted it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from algorithms import tree
from algorithms.base import (
    Algorithm,
    ClientContext,
    ClientUpdate,
    ComputedPayload,
    Exchange,
    LocalRule,
    LocalSettings,
    Payload,
    Tensors,
)
from algorithms.batches import Batch, Forward, forward_pair
from algorithms.gradients import Batches, Loss, Processes, full_gradient
from algorithms.local import LocalOptions, LocalResult, train_locally, values_before
from algorithms.model_state import personal_views, read_buffers, trainable_parameters, trainable_views
from algorithms.parameters import AlgorithmError
from algorithms.precision import rounded_like, widened
from algorithms.privacy.dp_sgd import Privacy, check_method


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What a training loop of the task's own did."""

    steps: int
    """K_i; greater than 0."""
    examples: int
    """n_i; greater than 0."""
    loss: float | None
    epochs: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, slots=True)
class LocalData:
    """A client's examples for one exchange."""

    batches: Batches
    """One batch for each local step; with `finish`, before its last step."""
    whole: Batches
    """Every example once, for a full gradient. Methods without one do not read it."""
    loss: Loss
    forward: Forward = forward_pair
    """(model, batch) -> (output, target), the arguments of the loss. By default, that of pairs (inputs, targets)."""
    steps: int = 0
    """Number of batches of local steps. Only a schedule of the learning rate needs it."""
    epoch_steps: int = 0
    """Batches of an epoch, to measure the mean loss of each. 0: it is not measured."""
    loop: Callable[[], LoopReport] | None = None
    """A training loop of the task's own, which trains the model in place of local steps."""
    finish: Callable[[Batch], Batch] | None = None
    """Completes a batch of `batches`, each example by itself, so that batches of many clients may be completed as one.
    Such a batch is a tuple of tensors. Equal functions do the same. None: the batches are complete."""

    privacy: Privacy | None = None
    """The local steps are those of DP-SGD, and `batches` Poisson batches of the same rate. None: plain gradients."""
    processes: Processes | None = None
    """Those that compute each batch together. None: this one alone."""

    @property
    def complete(self) -> Batches:
        """`batches`, completed."""
        return self.batches if self.finish is None else map(self.finish, self.batches)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a client in one exchange."""

    algorithm: Algorithm
    context: ClientContext
    settings: LocalSettings
    exchange: int = 0
    x: Tensors | None = None
    """The model's values if the caller has a copy; they are only read. None: `answer` makes a copy."""
    personal: frozenset[str] = frozenset()
    """Names of the model's parameters and buffers that are personal: they are trained, and in no payload."""


def answer(
    model: nn.Module, data: LocalData, work: Work, on_step: Callable[[int], object] | None = None
) -> ClientUpdate:
    """Compute the payloads of the exchange with a model that holds x. The model is trained in place.

    on_step: called after each batch of a full gradient and then after each step, with a number that counts from 0. Its
    exceptions end the work.

    Raises:
        AlgorithmError: a direction or a client state that the method needs is missing, or its steps cannot be private.
        ValueError: there is no batch, or a tensor does not have the model's layout.
    """
    notify = on_step or (lambda number: None)
    algorithm, exchange = work.algorithm, work.algorithm.exchanges[work.exchange]
    if data.privacy is not None:
        check_method(algorithm)
    rule = algorithm.client_rule(work.context) if exchange.trains else None
    whole, passes = None, 0
    if exchange.passes:
        whole, passes = _full_gradient(model, data, work, notify)
    result = None
    if rule is not None:
        result = _train(model, data, work, rule, lambda step: notify(passes + step))
    return update_of(model, work, whole, passes, result)


def update_of(  # noqa: PLR0913, PLR0917 - what the two kinds of work gave
    model: nn.Module, work: Work, whole: Tensors | None, passes: int, result: LocalResult | None
) -> ClientUpdate:
    """The payloads of the exchange, from a full gradient of `passes` batches and from a result of local training.

    Raises:
        AlgorithmError: a payload cannot be computed from them.
    """
    exchange = work.algorithm.exchanges[work.exchange]
    basic, rate = _basic_payloads(exchange, whole, result), work.settings.learning_rate
    if result is None:
        update = ClientUpdate(basic, {}, passes, rate)
    else:
        update = ClientUpdate(
            basic, result.buffers, result.steps, rate, result.loss, result.ascent, result.optimizer, result.personal,
            result.examples, result.epochs,
        )  # fmt: skip
    sent_like = trainable_views(model, work.personal)  # a computed payload may have the precision of a client's state
    return replace(
        update,
        payloads={
            payload: _computed(exchange.computed[payload], work.context, update, sent_like)
            if payload in exchange.computed
            else basic[payload]
            for payload in exchange.payloads
        },
    )


def _computed(rule: ComputedPayload, context: ClientContext, update: ClientUpdate, model: Tensors) -> Tensors:
    payload = rule.compute(context, update)
    return payload if rule.wide else rounded_like(model, payload)


def _train(  # noqa: PLR0913, PLR0917 - the parameters of `answer`
    model: nn.Module, data: LocalData, work: Work, rule: LocalRule, on_step: Callable[[int], object]
) -> LocalResult:
    if data.loop is not None:
        return train_by_loop(model, data.loop, work.x, work.personal)
    return train_locally(
        model,
        data.complete,
        data.loss,
        rule,
        work.settings,
        LocalOptions(
            work.x, on_step, data.forward, data.steps, work.personal, data.epoch_steps, data.privacy, data.processes
        ),
    )


def train_by_loop(
    model: nn.Module, loop: Callable[[], LoopReport], x: Tensors | None = None, personal: Collection[str] = ()
) -> LocalResult:
    """Let a training loop of the task's own train `model` in place, and take the delta from the model.

    Args:
        model: as in `train_locally`; it is in training mode when the loop begins.
        loop: trains the model. Its exceptions end the training.
        x: as in `LocalOptions`.
        personal: as in `LocalOptions`.

    Raises:
        ValueError: after the loop, the model has other trainable parameters, or another shape or dtype of one.
    """
    y = trainable_views(model, personal)
    x = widened(values_before(y, x, LocalRule()))
    trained = trainable_parameters(model).keys()
    model.train()
    report = loop()
    after = trainable_parameters(model)
    if after.keys() != trained:
        changed = ", ".join(sorted(after.keys() ^ trained)[:5])
        _restore_trainable(model, trained)
        raise ValueError(f"expected the training loop to leave requires_grad as it was, got a change of {changed}")
    model.zero_grad()
    after = trainable_views(model, personal)
    tree.check_layout(y, after, "the model after the training loop")
    delta = rounded_like(y, tree.subtract(widened(after), x))
    return LocalResult(
        delta,
        read_buffers(model, personal),
        report.steps,
        report.loss,
        personal=tree.map(torch.clone, personal_views(model, personal)),
        examples=report.examples,
        epochs=report.epochs,
    )


def _restore_trainable(model: nn.Module, trained: Collection[str]) -> None:
    """The model trains for other rounds too."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def _full_gradient(
    model: nn.Module, data: LocalData, work: Work, notify: Callable[[int], object]
) -> tuple[Tensors, int]:
    """The full gradient, and the number of its batches. They may be too many for the memory, so none is kept."""
    count = 0

    def counted(number: int) -> None:
        nonlocal count
        count = number + 1
        notify(number)

    rule = work.algorithm.gradient
    whole = full_gradient(
        model,
        data.whole,
        data.loss,
        work.settings,
        rule,
        on_batch=counted,
        forward=data.forward,
        processes=data.processes,
    )
    return {name: tensor for name, tensor in whole.items() if name not in work.personal}, count


def _basic_payloads(exchange: Exchange, whole: Tensors | None, result: LocalResult | None) -> dict[Payload, Tensors]:
    payloads = {"full_gradient": whole}
    if result is not None:
        payloads |= {"delta": result.delta, "client_momentum": result.v}
    basic = {payload: payloads.get(payload) for payload in exchange.basic}
    if missing := sorted(payload for payload, tensors in basic.items() if tensors is None):
        raise AlgorithmError(f"clients of this method cannot compute the payload {missing[0]!r}")
    return {payload: tensors for payload, tensors in basic.items() if tensors is not None}


def required_state(context: ClientContext, symbol: str) -> Tensors:
    """The client's state under a symbol. Raises AlgorithmError if there is none."""
    if symbol not in context.state:
        raise AlgorithmError(f"expected the client's state {symbol}, got none; start from the method's client_init")
    return context.state[symbol]


def required_payload(update: ClientUpdate, payload: Payload) -> Tensors:
    """A payload of an update. Raises AlgorithmError if the update does not have it."""
    if payload not in update.payloads:
        raise AlgorithmError(
            f"expected the update with the payload {payload}, got {', '.join(update.payloads) or 'none'}; the client's "
            "next state is computed from the update of the exchange that trains"
        )
    return update.payloads[payload]


def required_direction(context: ClientContext, symbol: str) -> Tensors:
    """The direction that the server sent. Raises AlgorithmError if it sent none. symbol: its name in the message."""
    if context.direction is None:
        raise AlgorithmError(f"expected {symbol} in addition to the model, got none; fetch the round's direction too")
    return context.direction
