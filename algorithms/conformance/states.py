"""Comparisons of two runs, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

import algorithms as fl
from algorithms.conformance.federation import RunState


def parts(standing: RunState) -> dict[str, fl.Tensors]:
    """Owner -> all tensors of a run."""
    named = {"x": standing.server.x, **{f"server {symbol}": kept for symbol, kept in standing.server.memory.items()}}
    for client, memory in sorted(standing.clients.items()):
        named |= {f"{client} {symbol}": kept for symbol, kept in memory.items()}
    return named


def same(a: RunState, b: RunState) -> bool:
    """Whether two runs hold the same bits."""
    one, other = parts(a), parts(b)
    return one.keys() == other.keys() and all(
        torch.equal(one[part][name], other[part][name]) for part in one for name in one[part]
    )


def mapped(function: Callable[[fl.Tensors], fl.Tensors], standing: RunState) -> RunState:
    """A run with `function` applied to its named tensors."""
    server = standing.server
    memory = {symbol: function(tensors) for symbol, tensors in server.memory.items()}
    clients = {
        client: {symbol: function(kept) for symbol, kept in own.items()} for client, own in standing.clients.items()
    }
    return RunState(fl.ServerState(function(server.x), memory), clients)


def assert_close(a: RunState, b: RunState) -> None:
    """Equal to 1e-12, all tensors of two runs."""
    torch.testing.assert_close(parts(a), parts(b), rtol=0, atol=1e-12)
