"""A step as a recording that is played without the Python code that made it: on CUDA a graph, on a CPU its operations.

What is recorded works in fixed memory and takes nothing else from the host: all that differs between two steps is in
tensors. Code that waits for a number of the device, or draws random numbers, cannot be recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], object]


class NotRecorded(Exception):
    """A step cannot be recorded; the text names the reason."""


class Recorder:
    """Records steps of one device. On CUDA they share a pool of memory, which ends with the recorder and all of them.

    They may share it because no two are played at once, and nothing in it is read after another one was played.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: tuple[torch.cuda.CUDAGraph, torch.cuda.Stream] | None = None
        """A recording that is never played, and the stream of all. It keeps the pool, which torch gives up when its
        last recording ends, also with one that failed."""

    def record(self, step: Step, memory: Sequence[Tensor]) -> Step:
        """What does the same as `step`, with the same bits. The step is made one time or more.

        memory: every tensor that changes between two steps. The others keep their values. The caller keeps all tensors
        that the step reads or writes: on CUDA a recording knows only their places.

        Raises:
            NotRecorded: the step does what cannot be recorded.
            OutOfMemoryError: there is no memory for it.
        """
        try:
            return self._graph(step) if self._device.type == "cuda" else _operations(step, memory)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotRecorded([*str(error).splitlines(), type(error).__name__][0]) from error

    def _graph(self, step: Step) -> Step:
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream()
            try:
                first, stream = self._first = self._first or _started()
                stream.wait_stream(here)
                # Libraries allocate their memory for a stream in a first step, which a recording must not have.
                with torch.cuda.stream(stream):
                    step()
                here.wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=first.pool(), stream=stream):
                    step()
            finally:
                torch.cuda.set_stream(here)  # torch stays on the stream of a recording that fails
        return graph.replay


def _started() -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        torch.zeros(1, device="cuda")
    return graph, stream


def _operations(step: Step, memory: Sequence[Tensor]) -> Step:
    # Loading it takes about a second, which most programs do not need.
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415

    def made(*_: Tensor) -> Tensor:
        step()
        return memory[0]  # torch's interpreter wants a result

    before = torch.default_generator.get_state()
    traced = make_fx(made)(*memory)
    if not torch.equal(before, torch.default_generator.get_state()):
        raise RuntimeError("it draws random numbers")
    played = _compiled(traced, memory)

    def play() -> None:
        with torch.no_grad(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]  # for the same bits
            played(*memory)

    return play


def _compiled(traced: nn.Module, memory: Sequence[Tensor]) -> Callable[..., Any]:
    """The operations in torch's interpreter, which takes half the time of Python's; some have no form there."""
    kept = [tensor.clone() for tensor in memory]
    compiled: Callable[..., Any] = traced
    with suppress(RuntimeError), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        compiled = torch.jit.trace(traced, (*memory,), check_trace=False)
    for tensor, values in zip(memory, kept, strict=True):
        tensor.copy_(values)
    return compiled
