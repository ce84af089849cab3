"""A client's part in one exchange, whatever the method: take what was sent, do what is wanted, answer.

context = ClientContext(direction, state)               state: what was kept, or algorithm.client_init(x)
update  = answer(model, data, Work(algorithm, context, settings))
state   = algorithm.next_client_state(context, update.admitted(clip_factor))        once the round counted it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from algorithms import tree
from algorithms.base import Algorithm, ClientContext, ClientUpdate, LocalSettings, Payload, Tensors
from algorithms.gradients import Batches, Loss, full_gradient
from algorithms.local import LocalResult, train_locally
from algorithms.parameters import AlgorithmError


@dataclass(frozen=True, slots=True)
class LocalData:
    """A client's examples as the exchange goes through them."""

    batches: Batches
    """One for each local step."""
    whole: Batches
    """Every example once, for a full gradient; not looked at by methods without one."""
    loss: Loss


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of a client in one exchange."""

    algorithm: Algorithm
    context: ClientContext
    settings: LocalSettings
    exchange: int = 0
    x: Tensors | None = None
    """The model's values, if the caller keeps them anyway; they are read only. None: a copy is made."""


def answer(
    model: nn.Module, data: LocalData, work: Work, on_step: Callable[[int], object] | None = None
) -> ClientUpdate:
    """The payloads that the exchange wants, from a model that holds x; it is trained in place.

    on_step: called after each batch of a full gradient and then after each step, with its number from 0 on; what it
    raises ends the work.

    Raises:
        AlgorithmError: a direction or a client state that the method needs is missing.
        ValueError: there was no batch, or a tensor is not laid out as the model's.
    """
    heard = on_step or (lambda number: None)
    algorithm, exchange = work.algorithm, work.algorithm.exchanges[work.exchange]
    rule = algorithm.client_rule(work.context) if exchange.trains else None
    whole, passes = None, 0
    if exchange.passes:
        batches = list(data.whole)
        whole = full_gradient(model, batches, data.loss, work.settings, algorithm.gradient, on_batch=heard)
        passes = len(batches)
    result = None
    if rule is not None:
        result = train_locally(
            model, data.batches, data.loss, rule, work.settings, x=work.x, on_step=lambda step: heard(passes + step)
        )
    made = {payload: _payload(payload, work.context, whole, result) for payload in exchange.payloads}
    rate = work.settings.learning_rate
    if result is None:
        return ClientUpdate(made, {}, passes, rate)
    return ClientUpdate(made, result.buffers, result.steps, rate, result.loss, result.ascent)


def _payload(payload: Payload, context: ClientContext, whole: Tensors | None, result: LocalResult | None) -> Tensors:
    match payload:
        case "delta" if result is not None:
            return result.delta
        case "client_momentum" if result is not None and result.v is not None:
            return result.v
        case "full_gradient" if whole is not None:
            return whole
        case "variate_change" if whole is not None:
            return tree.subtract(whole, kept(context, "c_i"))
    raise AlgorithmError(f"payload {payload!r} cannot be made by this method's clients")


def kept(context: ClientContext, symbol: str) -> Tensors:
    """What the client keeps under a symbol. Raises AlgorithmError if it has nothing."""
    if symbol not in context.state:
        raise AlgorithmError(f"expected the client's state {symbol}, got none; start from the method's client_init")
    return context.state[symbol]


def sent(context: ClientContext, symbol: str) -> Tensors:
    """What came down beside the model. Raises AlgorithmError if nothing did."""
    if context.direction is None:
        raise AlgorithmError(f"expected {symbol} beside the model, got none; fetch the round's direction too")
    return context.direction
