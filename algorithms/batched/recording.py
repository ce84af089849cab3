"""A step as a recording that is played without the Python code that made it: on CUDA a graph, on a CPU its operations.

What is recorded works in fixed memory and takes nothing else from the host: all that differs between two steps is in
tensors. Code that waits for a number of the device, or draws random numbers, cannot be recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], object]


class NotRecorded(Exception):
    """A step cannot be recorded; the text names the reason."""


def record(step: Step, memory: Sequence[Tensor], device: torch.device) -> Step:
    """What does the same as `step`, with the same bits. The step is made one time or more.

    memory: every tensor that changes between two steps. The others keep their values.

    Raises:
        NotRecorded: the step does what cannot be recorded.
        OutOfMemoryError: there is no memory for it.
    """
    try:
        return _graph(step, device) if device.type == "cuda" else _operations(step, memory)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotRecorded([*str(error).splitlines(), type(error).__name__][0]) from error


def _graph(step: Step, device: torch.device) -> Step:
    with torch.cuda.device(device):
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # libraries allocate their memory in a first step, which a graph must not have
            step()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_first_graph(torch.cuda.current_device()).pool()):
            step()
    return graph.replay


@cache
def _first_graph(_device: int) -> torch.cuda.CUDAGraph:
    """A recording that is never played. It keeps the memory that all recordings of a GPU share.

    They may share it because no two are played at once, and nothing in it is read after one was played.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
    return graph


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
