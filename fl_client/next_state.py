"""What a client will keep of a round, before it is known by what factor the coordinator clipped its delta.

The next state of every method is affine in that factor c, so two states say all of it: those for c = 1 and c = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms import tree
from algorithms.base import Algorithm, ClientContext, ClientUpdate, Memory, Tensors


@dataclass(frozen=True, slots=True)
class NextState:
    """A state that waits for the coordinator's word on its round."""

    whole: Memory
    """The state if the delta counts as it was sent."""
    unmoved: Memory
    """The state if nothing of the delta counted, for the symbols that depend on the delta."""

    @staticmethod
    def of(algorithm: Algorithm, context: ClientContext, answer: ClientUpdate) -> NextState:
        """What the method's clients keep of a round with this answer, which was made from `context`."""
        whole = algorithm.next_client_state(context, answer)
        unmoved = algorithm.next_client_state(context, answer.admitted(0.0))
        return NextState(whole, {symbol: it for symbol, it in unmoved.items() if not _equal(it, whole[symbol])})

    @property
    def size_bytes(self) -> int:
        """Of all tensors of both."""
        memories = (self.whole, self.unmoved)
        return sum(it.nbytes for memory in memories for tensors in memory.values() for it in tensors.values())

    def at(self, clip_factor: float) -> Memory:
        """The state of a round that counted with this factor; 1 gives the very tensors of `whole`."""
        if clip_factor == 1.0:
            return self.whole
        return {
            symbol: tree.map(lambda a, b: _blend(a, b, clip_factor), self.unmoved[symbol], tensors)
            if symbol in self.unmoved
            else tensors
            for symbol, tensors in self.whole.items()
        }


def _blend(unmoved: Tensor, whole: Tensor, share: float) -> Tensor:
    """unmoved + share * (whole - unmoved) in float64, rounded once."""
    return torch.lerp(unmoved.double(), whole.double(), share).to(whole.dtype)


def _equal(a: Tensors, b: Tensors) -> bool:
    return a is b or (a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items()))
