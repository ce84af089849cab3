"""The clients' part in one exchange, for many clients at once: `algorithms.client.answer` in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from algorithms import tree
from algorithms.base import ClientContext, ClientUpdate, Memory, Payload, Tensors
from algorithms.batched import stacked
from algorithms.batched.contexts import in_order, rules_of
from algorithms.batched.gradients import Settings, StackedGradients
from algorithms.batched.local import Steps
from algorithms.batched.members import Members
from algorithms.batched.strategies import Strategy
from algorithms.batched.training import Training
from algorithms.local import epoch_losses
from algorithms.model_state import read_buffers, trainable_views
from algorithms.parameters import AlgorithmError
from algorithms.precision import low_dtypes, rounded_like, widened


@dataclass(frozen=True, slots=True)
class Updates:
    """What `ClientUpdate` has, of all clients of a group."""

    payloads: Mapping[Payload, Tensors]
    """[clients, ...], in the order of the exchange."""
    buffers: Tensors
    """[clients, ...]; empty without training."""
    steps: Sequence[int]
    learning_rate: float
    losses: Sequence[float | None]
    epochs: Sequence[tuple[Mapping[str, float], ...]]
    ascents: Sequence[Tensors] = field(default_factory=list)
    """One for each client; empty if there are none."""
    optimizers: Sequence[Memory] = field(default_factory=list)
    """So too."""

    def of_client(self, position: int) -> ClientUpdate:
        """One client's update, whose tensors are views."""
        return ClientUpdate(
            {payload: stacked.of_client(tensors, position) for payload, tensors in self.payloads.items()},
            stacked.of_client(self.buffers, position),
            self.steps[position],
            self.learning_rate,
            self.losses[position],
            self.ascents[position] if self.ascents else {},
            self.optimizers[position] if self.optimizers else {},
            epochs=self.epochs[position],
        )


def answer_together(model: nn.Module, members: Members, training: Training) -> Updates:
    """Compute the payloads of one exchange for clients that start from the model's values, which stay.

    Each client's update equals that of `answer` up to the rounding of sums. torch's default generators are changed.

    Raises:
        NotBatched: the work is possible only for one client after the other.
        OutOfMemoryError: there is no memory for the group.
        AlgorithmError, ValueError: as `answer`.
    """
    work, views = members.work, trainable_views(model)
    exchange, clients = work.algorithm.exchanges[work.exchange], len(members.steps)
    rules = rules_of(work.algorithm, members.contexts, widened(views)) if exchange.trains else None
    basic: dict[Payload, Tensors] = {}
    nothing: list[tuple[Mapping[str, float], ...]] = [()] * clients
    updates = Updates({}, {}, [0] * clients, work.settings.learning_rate, [None] * clients, nothing)
    if exchange.passes:
        basic["full_gradient"], passes = _full_gradients(model, members, training.strategy)
        updates = replace(updates, steps=passes)
    if rules is not None:
        steps, losses = training.train(model, members, rules)
        basic["delta"] = rounded_like(views, tree.map(lambda y, x: y - x, steps.y, steps.x))
        if steps.v is not None:
            basic["client_momentum"] = rounded_like(views, tree.map(torch.clone, steps.v))
        updates = _trained(model, members, steps, losses)
    if missing := sorted(exchange.basic - basic.keys()):
        raise AlgorithmError(f"clients of this method cannot compute the payload {missing[0]!r}")
    updates = replace(updates, payloads={payload: basic[payload] for payload in exchange.basic})
    return replace(
        updates,
        payloads={
            payload: _computed(members, updates, payload, views)
            if payload in exchange.computed
            else updates.payloads[payload]
            for payload in exchange.payloads
        },
    )


def _trained(model: nn.Module, members: Members, steps: Steps, losses: Tensor) -> Updates:
    """What local training gave, without payloads. The losses are read from the device at once."""
    clients = range(len(members.steps))
    zero = losses.new_zeros(1, len(clients), dtype=torch.float64)
    sums: list[list[float]] = torch.cat([zero, losses.double().cumsum(0)]).T.tolist()
    return Updates(
        {},
        {name: steps.buffers[name].clone() for name in read_buffers(model)} if steps.buffers else {},
        members.steps,
        members.work.settings.learning_rate,
        [sums[client][count] / count for client, count in enumerate(members.steps)],
        [_epochs(sums[client], members.epoch_steps[client], members.steps[client]) for client in clients],
        [dict(parameters) for parameters in steps.gradients.ascended],
        [optimizer.memory() for optimizer in steps.optimizers],
    )


def _epochs(sums: Sequence[float], epoch_steps: int, steps: int) -> tuple[Mapping[str, float], ...]:
    if not epoch_steps:
        return ()
    return epoch_losses([sums[end] for end in (*range(0, steps, epoch_steps), steps)], epoch_steps, steps)


def _computed(members: Members, updates: Updates, payload: Payload, model: Tensors) -> Tensors:
    """A payload that the method computes from the basic ones."""
    work, contexts = members.work, members.contexts
    rule = work.algorithm.exchanges[work.exchange].computed[payload]

    def compute(context: ClientContext, payloads: Mapping[Payload, Tensors], position: int) -> Tensors:
        update = updates.of_client(position)
        return rule.compute(context, replace(update, payloads=payloads))

    found: Tensors = in_order(contexts.map(compute, updates.payloads, _own(updates)))
    return found if rule.wide else rounded_like(model, found)


def next_states(members: Members, updates: Updates) -> tuple[Memory, Memory] | list[tuple[Memory, Memory]]:
    """The clients' next states if their deltas count as sent, and if they count as 0.

    [clients, ...], or for states that differ in their tensors a pair for each client.
    """
    algorithm, factors = members.work.algorithm, (1.0, 0.0)

    def advance(factor: float, context: ClientContext, payloads: Mapping[Payload, Tensors], position: int) -> Memory:
        update = replace(updates.of_client(position), payloads=payloads)
        return dict(algorithm.next_client_state(context, update.admitted(factor)))

    if updates.ascents or updates.optimizers or members.contexts.separate is not None:
        pairs = []
        for position in range(len(members.steps)):
            context, payloads = members.contexts.of(position), updates.of_client(position).payloads
            one, zero = (advance(factor, context, payloads, position) for factor in factors)
            pairs.append((one, zero))
        return pairs
    one, zero = (
        in_order(members.contexts.map(partial(advance, factor), updates.payloads, updates.steps)) for factor in factors
    )
    return one, zero


def _own(updates: Updates) -> Sequence[object]:
    """What makes the code of a computed payload run client by client, or for clients with equal steps at once."""
    return range(len(updates.steps)) if updates.ascents or updates.optimizers else updates.steps


def _full_gradients(model: nn.Module, members: Members, strategy: Strategy) -> tuple[Tensors, list[int]]:
    """Each client's g over its whole local set at the model's values, [clients, ...], and the number of its batches.

    Buffers and the clients' random numbers stay as they are.
    """
    x, work, numbers = trainable_views(model), members.work, members.numbers
    wide, clients, rule = widened(x), len(members.steps), work.algorithm.gradient
    mark = numbers.mark()
    totals = stacked.repeated(tree.map(torch.zeros_like, wide), clients)
    examples, counts, like = [0] * clients, [0] * clients, next(iter(totals.values()))
    model.train()
    settings = Settings(work.settings, rule, rule.rho > 0.0, low_dtypes(x))
    for positions, batches in members.batches.whole():
        point = {name: tensor.expand(len(positions), *tensor.shape) for name, tensor in wide.items()}
        buffers = stacked.repeated({name: buffer.detach() for name, buffer in model.named_buffers()}, len(positions))
        g, _ = StackedGradients(strategy, settings, buffers, numbers.of(positions)).compute(point, batches)
        sizes = batches.sizes
        weighed = stacked.scale(g, tree.uploaded(sizes, like.dtype, like.device))
        rows = tree.uploaded(positions, torch.int64, like.device)
        for name, total in totals.items():
            total.index_add_(0, rows, weighed[name])
        numbers.next_step()
        for position, size in zip(positions, sizes, strict=True):
            examples[position] += size
            counts[position] += 1
    numbers.go_back(mark)
    if not all(counts):
        raise ValueError("expected at least one batch for a full gradient, got none; does this client hold examples?")
    mean = stacked.scale(totals, tree.uploaded([1.0 / count for count in examples], like.dtype, like.device))
    return rounded_like(x, mean), counts
