"""Passes of many clients as CUDA graphs: recorded once for each shape of inputs, then replayed without launches.

A recorded pass reads and writes fixed memory, so its inputs are copied in and its results out. What cannot be recorded
is computed by the strategy itself: passes that draw random numbers, that have batches of several shapes or an input
map, whose code waits for the device, and those on a CPU.
"""

from __future__ import annotations

from collections import Counter

import torch

from algorithms import tree
from algorithms.batched.strategies import Inputs, Outputs, Strategy
from algorithms.batches import leaves, map_leaves

SEEN = 3
"""Passes of a shape before it is recorded: rare shapes, such as those of the last clients with steps, are not."""
MOST_GRAPHS = 4
"""Each keeps the memory of its pass."""

Shape = tuple[object, ...]


class FixedPass:
    """A pass in fixed memory, recorded or not."""

    def __init__(self, strategy: Strategy, like: Inputs) -> None:
        """like: inputs of the shapes and dtypes of all later ones."""
        parameters = {name: each.detach().clone().requires_grad_() for name, each in like.parameters.items()}
        batches = [map_leaves(torch.clone, batch) for batch in like.batches]
        self._strategy = strategy
        self._inputs = Inputs(parameters, tree.map(torch.clone, like.constants), batches, like.streams)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs | None = None

    def record(self) -> None:
        """Record the pass. Raises RuntimeError for one that cannot be recorded. Only on CUDA."""
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # libraries allocate their memory in a first pass, which a graph must not have
            self._strategy.compute(self._inputs)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = self._strategy.compute(self._inputs)
        self._graph = graph

    def compute(self, inputs: Inputs) -> Outputs:
        """As the strategy. The results are in memory of their own."""
        fixed = self._inputs
        tree.copy_(tree.map(torch.detach, fixed.parameters), tree.map(torch.detach, inputs.parameters))
        if fixed.constants:
            tree.copy_(fixed.constants, inputs.constants)
        for into, batch in zip(fixed.batches, inputs.batches, strict=True):
            for one, other in zip(leaves(into), leaves(batch), strict=True):
                one.copy_(other)
        if self._graph is None:
            self._outputs = self._strategy.compute(fixed)
        else:
            self._graph.replay()
        if self._outputs is None:
            raise RuntimeError("a recorded pass has no outputs")
        if fixed.constants:
            tree.copy_(inputs.constants, fixed.constants)
        return Outputs(self._outputs.losses.clone(), tree.map(torch.clone, self._outputs.gradients), [])


class Captured:
    """A strategy whose passes are recorded where that is possible; see `Strategy`."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._seen: Counter[Shape] = Counter()
        self._passes: dict[Shape, FixedPass] = {}
        self.impossible = ""
        """Why passes are not recorded; empty if they may be."""

    def __str__(self) -> str:
        if self.impossible:
            return f"no pass is recorded ({self.impossible})"
        return f"passes of {len(self._passes)} shapes are recorded"

    def compute(self, inputs: Inputs) -> Outputs:
        """As in Strategy."""
        shape = self._shape(inputs)
        if shape is None:
            return self._strategy.compute(inputs)
        if shape in self._passes:
            return self._passes[shape].compute(inputs)
        self._seen[shape] += 1
        if self._seen[shape] > SEEN and len(self._passes) < MOST_GRAPHS:
            fixed = FixedPass(self._strategy, inputs)
            try:
                fixed.record()
            except RuntimeError as error:
                self.impossible = str(error).splitlines()[0]
            else:
                self._passes[shape] = fixed
                return fixed.compute(inputs)
        before = [stream.state for stream in inputs.streams]
        outputs = self._strategy.compute(inputs)
        if any(stream.state is not state for stream, state in zip(inputs.streams, before, strict=True)):
            self.impossible = "the model draws random numbers"
        return outputs

    def _shape(self, inputs: Inputs) -> Shape | None:
        """What decides whether a recorded pass fits; None for inputs that cannot be recorded."""
        if self.impossible or inputs.also or next(iter(inputs.parameters.values())).device.type != "cuda":
            return None
        batches = {tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves(batch)) for batch in inputs.batches}
        return (len(inputs.batches), *batches) if len(batches) == 1 else None
