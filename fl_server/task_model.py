"""The task's model as a module: it is kept for evaluations, and holds values only while somebody uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import algorithms as fl
from algorithms.model_state import state_views
from fl_server.allocator import give_back_freed_memory
from fl_server.errors import InvalidInput
from fl_server.sampling import initial_model_seed
from protos.codec import Layout
from tasks import Task
from tasks.base import task_code


class TaskModel:
    """One run's module. Not for two threads at once."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._module = self._built()
        values = state_views(self._module)
        self.layout = Layout.of({**values.trainable, **values.buffers}, trainable=values.trainable.keys())
        """Of what goes down every round: trainable tensors, then buffers."""
        self.trainable_layout = Layout.of(values.trainable, trainable=values.trainable.keys())

    def _built(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(initial_model_seed(self._seed))
            with task_code("the task's model()"):
                module = self._task.model()
        self._memories = _memories(module)
        self._has_first = True
        return module

    @contextmanager
    def first(self, path: str = "") -> Iterator[fl.ModelState]:
        """The values that the run begins with, the seed's or those of a safetensors file; copy what is to stay.

        Raises InvalidInput if the file named by `path` does not fit.
        """
        if not self._has_first:
            self._module = self._built()
        if path:
            _load_file(self._module, Path(path))
        yield state_views(self._module)
        self.release()

    def release(self) -> None:
        """Let go of the values; what is in no state_dict stays, for only a module that is built anew would have it."""
        self._has_first = False
        for memory, _ in self._memories:
            memory.resize_(0)
        give_back_freed_memory()

    @contextmanager
    def filled(self, values: fl.ModelState) -> Iterator[nn.Module]:
        """The module with copies of these values: whatever happens to it, they stay as they are."""
        for memory, size in self._memories:
            memory.resize_(size)
        try:
            fl.load_state(self._module, values)
            yield self._module
        finally:
            self.release()


def _memories(module: nn.Module) -> list[tuple[torch.UntypedStorage, int]]:
    """What `load_state` fills anew and can be given back meanwhile, with the sizes: each the whole of one tensor.

    Views and tied weights keep pointing into it. Memory that somebody else lent, as a mapped file, is left alone.
    """
    persistent = module.state_dict().keys()
    tensors = [*module.parameters(), *(buffer for name, buffer in module.named_buffers() if name in persistent)]
    found = {}
    for tensor in tensors:
        memory = tensor.untyped_storage()
        if tensor.numel() and tensor.nbytes == memory.nbytes() and memory.resizable():
            found[memory.data_ptr()] = (memory, memory.nbytes())
    return list(found.values())


def _load_file(module: nn.Module, path: Path) -> None:
    """The values of a safetensors file with the model's own names."""
    if path.exists() and not path.is_file():  # a pipe would be waited for, a device never ends
        raise InvalidInput("initial_model", "a safetensors file of this task's model on the server", path)
    try:
        module.load_state_dict(load_file(path), strict=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidInput("initial_model", "a safetensors file of this task's model on the server", error) from error
