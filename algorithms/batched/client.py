"""The clients' part in one exchange, for many clients at once: `algorithms.client.answer` in lockstep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from algorithms import tree
from algorithms.base import ClientUpdate, Tensors
from algorithms.batched import stacked
from algorithms.batched.batches import check_work
from algorithms.batched.gradients import Settings, StackedGradients
from algorithms.batched.local import Member, train_together
from algorithms.batched.modules import RandomStream
from algorithms.batched.strategies import Strategy
from algorithms.batches import Batch, examples_of
from algorithms.client import update_of
from algorithms.local import LocalResult
from algorithms.model_state import trainable_parameters
from algorithms.precision import low_dtypes, rounded_like, widened


def answer_together(model: nn.Module, members: Sequence[Member], strategy: Strategy) -> list[ClientUpdate]:
    """Compute the payloads of one exchange for clients that start from the model's values, which stay.

    The members have the same algorithm, exchange and settings. Updates come in the order of the members; each equals
    that of `answer` up to the rounding of sums. torch's default generators are changed.

    Raises:
        NotBatched: the work is possible only for one client after the other.
        AlgorithmError, ValueError: as `answer`.
    """
    for member in members:
        check_work(member.data, member.work)
    exchange = members[0].work.algorithm.exchanges[members[0].work.exchange]
    order = sorted(range(len(members)), key=lambda i: -members[i].data.steps)
    ordered = [members[i] for i in order]
    wholes: list[tuple[Tensors | None, int]] = [(None, 0)] * len(members)
    if exchange.passes:
        wholes = list(_full_gradients(model, ordered, strategy))
    results: list[LocalResult | None] = [None] * len(members)
    if exchange.trains:
        rules = [member.work.algorithm.client_rule(member.work.context) for member in ordered]
        results = [*train_together(model, ordered, rules, strategy)]
    updates = {
        i: update_of(model, member.work, *whole, result)
        for i, member, whole, result in zip(order, ordered, wholes, results, strict=True)
    }
    return [updates[i] for i in range(len(members))]


def _full_gradients(model: nn.Module, members: Sequence[Member], strategy: Strategy) -> Iterator[tuple[Tensors, int]]:
    """Each client's g over its whole local set at the model's values, and the number of its batches.

    Buffers and the clients' random numbers stay as they are.
    """
    x, work = trainable_parameters(model), members[0].work
    wide = widened(tree.map(torch.detach, x))
    streams = [member.stream for member in members]
    before = [stream.state for stream in streams]
    totals, examples, counts = (
        stacked.repeated(tree.map(torch.zeros_like, wide), len(members)),
        [0] * len(members),
        [0] * len(members),
    )
    rule = work.algorithm.gradient
    model.train()
    for positions, batches in _rounds(members):
        point = {name: each.expand(len(positions), *each.shape) for name, each in wide.items()}
        buffers = stacked.repeated({name: each.detach() for name, each in model.named_buffers()}, len(positions))
        settings = Settings(work.settings, rule, rule.rho > 0.0, low_dtypes(x))
        gradients = StackedGradients(strategy, settings, buffers, [streams[i] for i in positions])
        g, _ = gradients.compute(point, batches)
        for row, (position, batch) in enumerate(zip(positions, batches, strict=True)):
            size = examples_of(batch)
            tree.add_(stacked.of_client(totals, position), stacked.of_client(g, row), float(size))
            examples[position] += size
            counts[position] += 1
    for stream, state in zip(streams, before, strict=True):
        stream.state = state
    for position in range(len(members)):
        if not counts[position]:
            raise ValueError(
                "expected at least one batch for a full gradient, got none; does this client hold examples?"
            )
        mean = tree.scale(stacked.of_client(totals, position), 1.0 / examples[position])
        yield rounded_like(x, mean), counts[position]


def _rounds(members: Sequence[Member]) -> Iterator[tuple[list[int], list[Batch]]]:
    """The next batch of the whole local set of every client that has one, with the clients' positions."""
    batches = [iter(member.data.whole) for member in members]
    positions = list(range(len(members)))
    while True:
        drawn: list[tuple[int, Batch]] = []
        for position in positions:
            batch = _read(batches[position], members[position].stream)
            if batch is not None:
                drawn.append((position, batch))
        if not drawn:
            return
        positions = [position for position, _ in drawn]
        yield positions, [batch for _, batch in drawn]


def _read(batches: Iterator[Batch], stream: RandomStream) -> Batch | None:
    with stream.use():
        return next(batches, None)
