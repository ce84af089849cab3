"""The task's model as a torch module. It is kept for evaluations, and holds values only while it is in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import algorithms as fl
from algorithms.model_state import fill, personal_names, state_views, tied_names
from fl_common.allocator import give_back_freed_memory
from fl_server.errors import InvalidInput
from fl_server.rounds.sampling import initial_model_seed
from protos.codec import Layout, LayoutError
from tasks import Task, TaskError
from tasks.base import task_code


class TaskModel:
    """One run's module. Not for two threads at once."""

    def __init__(self, task: Task, seed: int, personal: Iterable[str] = ()) -> None:
        """Build the model. Raises TaskError for one that cannot be built, trained or sent.

        personal: patterns of the names of personal parameters. Raises InvalidInput if one does not fit the model.
        """
        self._task = task
        self._seed = seed
        self._module = self._built()
        self._personal = _matched(self._module, tuple(personal))
        values = state_views(self._module, self._personal)
        if not values.trainable:
            raise TaskError("expected a model with trainable parameters, got none; is all of it frozen?")
        try:
            self.layout = Layout.of({**values.trainable, **values.buffers}, trainable=values.trainable.keys())
            """Layout of the bundle sent every round: trainable tensors, then buffers."""
            self.trainable_layout = Layout.of(values.trainable, trainable=values.trainable.keys())
        except LayoutError as error:
            raise TaskError(f"the task's model cannot be sent: {error}") from error
        self.tied = tied_names(self._module)
        """Names of the state_dict that the layout leaves out, because they are second names -> the first name."""

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
        """The initial values of the run, from its seed or from a safetensors file. Copy the values to keep them.

        Raises InvalidInput if the file named by `path` does not fit.
        """
        if not self._has_first:
            self._module = self._built()
        if path:
            _load_file(self._module, Path(path))
        yield state_views(self._module, self._personal)
        self.release()

    def release(self) -> None:
        """Release the values. Tensors outside the state_dict stay: only a newly built module would have them again."""
        self._has_first = False
        for memory, _ in self._memories:
            memory.resize_(0)
        give_back_freed_memory()

    @contextmanager
    def filled(self, values: fl.ModelState) -> Iterator[nn.Module]:
        """The module with copies of these values: changes to the module do not affect them."""
        for memory, size in self._memories:
            memory.resize_(size)
        try:
            fill(state_views(self._module, self._personal), values)
            yield self._module
        finally:
            self.release()


def _matched(module: nn.Module, patterns: tuple[str, ...]) -> frozenset[str]:
    try:
        return personal_names(module, patterns)
    except ValueError as error:
        raise InvalidInput("personal", "patterns that fit the names in the task's model", error) from error


def _memories(module: nn.Module) -> list[tuple[torch.UntypedStorage, int]]:
    """The memories that `load_state` fills, with their sizes: each is the whole of one tensor and can be released.

    Views and tied weights keep pointing into them. Memory with another owner, such as a mapped file, is skipped.
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
    """The values of a safetensors file with the model's own names; of tied weights, any of the names is enough."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block, and a device never ends
            raise InvalidInput("initial_model", "a safetensors file of this task's model on the server", path)
        module.load_state_dict(_with_tied(load_file(path), tied_names(module)), strict=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidInput("initial_model", "a safetensors file of this task's model on the server", error) from error


def _with_tied(values: dict[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The values under all names of tied weights."""
    first = {of: values[name] for name, of in tied.items() if name in values and of not in values}
    values = {**values, **first}
    return {**values, **{name: values[of] for name, of in tied.items() if name not in values and of in values}}
