"""The module of a run's task: built, loaded from a file, filled with values and released; tensors in their wire layout.

The tensors of a model lie in memory as in its bundle, so that the model kept and the bundle sent are the same memory.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import algorithms as fl
from algorithms.model_state import fill, personal_names, state_tensors, state_views, tied_names
from algorithms.precision import master_dtype
from fl_common.allocator import give_back_freed_memory
from fl_common.units import counted
from fl_server.errors import InvalidInput
from fl_server.rounds.sampling import initial_model_seed
from fl_server.store.errors import file_digest
from fl_tasks import Task, TaskError, own_options
from fl_tasks.new_model import ModelTooLarge, held_outside, new_model, remarks_on
from protos.buffers import zeros
from protos.codec import Buffer, Layout, LayoutError, check_tensors, pack, unpack, views
from protos.digests import digest_text
from protos.fl.v1.tensor_pb2 import Resource
from protos.frozen import frozen_resource, frozen_text, tensor_digests

CPU = torch.device("cpu")
_FIELD, _EXPECTED = "initial_model", "a safetensors file of this task's model"


def blank(layout: Layout, device: torch.device = CPU) -> fl.Tensors:
    """Tensors of a layout, all zero, as views on one new buffer of `layout.size_bytes` bytes."""
    if device.type == "cpu":
        return unpack(zeros(layout.size_bytes), layout)
    return views(torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device), layout)


def master_layout(layout: Layout) -> Layout:
    """The layout of a server's state for parameters of this layout: float32 in place of a lower precision."""
    if all(entry.dtype == master_dtype(entry.dtype) for entry in layout.entries):
        return layout
    entries = {
        entry.name: torch.empty(entry.shape, dtype=master_dtype(entry.dtype), device="meta") for entry in layout.entries
    }
    return Layout.of(entries, trainable=[entry.name for entry in layout.entries if entry.trainable])


def laid_out(tensors: fl.Tensors, layout: Layout, device: torch.device = CPU) -> fl.Tensors:
    """Copies of the tensors as views on one new buffer. Raises LayoutError if they are not those of the layout."""
    check_tensors(tensors, layout)
    made = blank(layout, device)
    for name, tensor in made.items():
        tensor.copy_(tensors[name].detach())
    return made


def packed(tensors: fl.Tensors, layout: Layout) -> Buffer:
    """The tensors as the bytes of a bundle: their own memory if it has the layout, otherwise a copy.

    The bytes are read-only, and the tensors must not change while the bytes are in use. Raises LayoutError
    if they are not the tensors of the layout.
    """
    memory = _memory_of(tensors, layout)
    return memory if memory is not None and _gaps_are_zero(memory, layout) else pack(tensors, layout)


def _memory_of(tensors: fl.Tensors, layout: Layout) -> memoryview | None:
    """The memory that holds exactly these tensors, at the layout's offsets; None if there is none."""
    filled = [entry for entry in layout.entries if entry.nbytes]
    if not filled or tensors.keys() != {entry.name for entry in layout.entries}:
        return None
    storage = tensors[filled[0].name].untyped_storage()
    if storage.nbytes() != layout.size_bytes or storage.device.type != "cpu":
        return None
    for entry in layout.entries:
        tensor = tensors[entry.name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            return None
        if entry.nbytes and (tensor.data_ptr() != storage.data_ptr() + entry.offset or not tensor.is_contiguous()):
            return None
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data.toreadonly()


def _gaps_are_zero(memory: memoryview, layout: Layout) -> bool:
    """Whether the bytes between tensors are zero, as in a bundle."""
    ends = [0, *(entry.end for entry in layout.entries)]
    return not any(any(memory[end : entry.offset]) for end, entry in zip(ends, layout.entries, strict=False))


def groups(layout: Layout, group_bytes: int) -> list[list[str]]:
    """The names of a layout's tensors in order, in groups of about `group_bytes`; a larger tensor is alone."""
    made: list[list[str]] = []
    room = -math.inf
    for entry in layout.entries:
        if entry.nbytes > room:
            made.append([])
            room = group_bytes
        made[-1].append(entry.name)
        room -= entry.nbytes
    return made


def initial_path(wanted: str, start: Path | None) -> str:
    """The path of a run's initial model; empty for none.

    wanted: the run's `initial_model`. start: the file whose digest that is; None: it is a path itself. Raises
    InvalidInput for another file than the run's.
    """
    if not wanted or start is None:
        return wanted
    if (got := digest_text(file_digest(start))) != wanted:
        raise InvalidInput(_FIELD, f"the file with the digest {wanted}", got)
    return str(start)


def load_initial(module: nn.Module, path: Path, *, keep_frozen: bool) -> None:
    """Load the values of a safetensors file with the model's own names; of tied weights, any of the names is enough.

    keep_frozen: the frozen parameters stay. The file may leave them out, and must not have other values of them.
    Raises InvalidInput for a file that does not fit.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block, and a device never ends
            raise InvalidInput(_FIELD, _EXPECTED, path)
        values = _with_tied(load_file(path), tied_names(module))
        if keep_frozen:
            values = _with_frozen(values, module)
        module.load_state_dict(values, strict=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidInput(_FIELD, _EXPECTED, error) from error


def _with_frozen(values: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """The values with the frozen parameters of the module. Raises InvalidInput for others in the file."""
    frozen = dict(state_views(module).frozen)
    frozen |= {name: frozen[of] for name, of in tied_names(module).items() if of in frozen}
    for name in frozen.keys() & values.keys():
        if values[name].dtype != frozen[name].dtype or not torch.equal(values[name], frozen[name]):
            raise InvalidInput(
                _FIELD,
                'with task.frozen = "local", a file without the frozen parameters, or with those of the task',
                f"other values of {name!r}",
            )
    return {**values, **frozen}


def _with_tied(values: dict[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The values under all names of tied weights."""
    first = {of: values[name] for name, of in tied.items() if name in values and of not in values}
    values = {**values, **first}
    return {**values, **{name: values[of] for name, of in tied.items() if name not in values and of in values}}


class TaskModel:
    """One run's module. Not for two threads at once."""

    def __init__(  # noqa: PLR0913 - a run's settings of its model
        self,
        task: Task,
        seed: int,
        personal: Iterable[str] = (),
        *,
        own_frozen: bool = False,
        max_bytes: int = 0,
    ) -> None:
        """Build the model. Raises TaskError for one that cannot be built, trained or sent.

        personal: patterns of the names of personal parameters. own_frozen: clients have the frozen parameters from
        their own tasks. The module is then built anew for each use, so that these take no memory in between. Raises
        InvalidInput if one of the two does not fit the model.
        max_bytes: of the tensors that building the model takes; 0: any. Raises TaskError for more.
        """
        self._task, self._seed, self._max_bytes = task, seed, max_bytes
        module = self._built(seed)
        self._module: nn.Module | None = module
        self._personal = _matched(module, tuple(personal))
        self.local_frozen = _local_frozen(module) if own_frozen else None
        """The frozen parameters that clients must have too. None if they are sent, or there are none."""
        values = self._views(module)
        if not values.trainable:
            raise TaskError("expected a model with trainable parameters, got none; is all of it frozen?")
        try:
            self.layout = Layout.of({**values.trainable, **values.buffers}, trainable=values.trainable.keys())
            """Layout of the bundle sent every round: trainable tensors, then buffers."""
            self.trainable_layout = Layout.of(values.trainable, trainable=values.trainable.keys())
            Layout.of(values.frozen)
        except LayoutError as error:
            raise TaskError(f"the task's model cannot be sent: {error}") from error
        tied = tied_names(module)
        own = {} if self.local_frozen is None else state_views(module).frozen
        self.tied = {name: of for name, of in tied.items() if of not in own}
        """Names of the state_dict that the layout leaves out, because they are second names -> the first name."""
        self.remarks = remarks_on(module)
        """What the creator of the run should know of the model."""
        self._has_first = True

    def _views(self, module: nn.Module) -> fl.ModelState:
        """Views of the run's values: without the frozen parameters that clients have themselves."""
        views = state_views(module, self._personal)
        if self.local_frozen is None:
            return views
        return replace(views, frozen={name: each for name, each in views.frozen.items() if name in self._personal})

    def _built(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(initial_model_seed(seed))
            try:
                module = new_model(self._task, self._max_bytes)
            except ModelTooLarge as error:
                raise ModelTooLarge(
                    f"the task's model(): expected tensors of at most {self._max_bytes >> 20} MiB, got {error} or more:"
                    " choose smaller options of the task, or raise limits.max_model_mib in server.toml; the models of"
                    " all runs under way have at most limits.max_models_mib"
                ) from error
        self._memories = _memories(module)
        return module

    @contextmanager
    def first(self, path: str = "") -> Iterator[fl.ModelState]:
        """The initial values of the run, from its seed or from a safetensors file. Copy the values to keep them.

        Frozen parameters that clients have themselves are not among them. Raises InvalidInput if the file named by
        `path` does not fit, or such frozen parameters differ from model to model.
        """
        if self._module is None or not self._has_first:
            self._module = self._built(self._seed)
        if path:
            load_initial(self._module, Path(path), keep_frozen=self.local_frozen is not None)
        views = self._views(self._module)
        _check_finite(views.trainable, f"initial_model {path}" if path else "the task's model()")
        yield views
        del views
        frozen = {} if self.local_frozen is None else tensor_digests(state_views(self._module).frozen)
        self.release()
        if frozen:
            self._check_constant(frozen)

    def _check_constant(self, frozen: Mapping[str, bytes]) -> None:
        """Raises InvalidInput if a model of another seed has other frozen parameters: no device could have these."""
        other = self._built(self._seed + 1)
        again = tensor_digests(state_views(other).frozen)
        if differing := [name for name in frozen if frozen[name] != again.get(name)]:
            raise InvalidInput(
                "task.frozen",
                'frozen parameters that are the same in every model() for "local"',
                f"random values in {differing[0]!r} ({len(differing)} of {counted(len(frozen), 'tensor')}): "
                "load them from a file,"
                ' or give them a fixed seed inside model(), or set task.frozen = "send"',
            )
        del other
        self.release()

    def release(self) -> None:
        """Release the values. Tensors outside the state_dict stay: only a newly built module would have them again.

        A module that the task's code holds on to is left to it: it would read memory that is gone.
        """
        self._has_first = False
        owner, self._module = [self._module] if self._module is not None else [], None
        if not owner or self.local_frozen is not None or held_outside(owner):
            left = [weakref.ref(module) for module in owner]
            owner.clear()
            memories, self._memories = [StorageWeakRef(memory) for memory, _ in self._memories], []
            if any(module() is not None for module in left) or not all(each.expired() for each in memories):
                gc.collect()  # modules of some libraries refer to themselves
        for memory, _ in self._memories:
            memory.resize_(0)
        self._module = owner.pop() if owner else None
        give_back_freed_memory()

    @contextmanager
    def filled(self, values: fl.ModelState) -> Iterator[nn.Module]:
        """The module with copies of these values: changes to the module do not affect them. Keep no reference to it.

        Raises TaskError if the frozen parameters that clients have themselves are others now.
        """
        if self._module is None or self.local_frozen is not None:
            self._module = self._built_again()
        for memory, size in self._memories:
            if memory.nbytes() != size:  # a digest read some of a new module's memory, which then has a fixed size
                memory.resize_(size)
        try:
            fill(self._views(self._module), values)
            yield self._module
        finally:
            self.release()

    def _built_again(self) -> nn.Module:
        module = self._built(self._seed)
        if self.local_frozen is None:
            return module
        now = frozen_resource(state_views(module).frozen)
        if now != self.local_frozen:
            raise TaskError(other_frozen(frozen_text(self.local_frozen), frozen_text(now)))
        return module


def other_frozen(expected: str, now: str) -> str:
    """The text of an error: the task's model has other frozen parameters than the run. Digests as text."""
    return (
        f"expected the frozen parameters of the run, {expected or 'none'}, got {now or 'none'} from the"
        " task's model() here: put the files back that it loads"
    )


def _check_finite(parameters: fl.Tensors, source: str) -> None:
    """Raises InvalidInput for a first model that no training can start from. Buffers may be masks of minus infinity."""
    for name, tensor in parameters.items():
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            raise InvalidInput(
                "initial_model" if source.startswith("initial") else "task",
                f"finite parameters in the first model, which {source} gives",
                f"NaN or infinity in {name!r}: check how it is initialised",
            )


def _local_frozen(module: nn.Module) -> Resource:
    if (resource := frozen_resource(state_views(module).frozen)) is None:
        raise InvalidInput(
            "task.frozen", '"send" for a model that trains all of its parameters (requires_grad = True)', "local"
        )
    return resource


def _matched(module: nn.Module, patterns: tuple[str, ...]) -> frozenset[str]:
    try:
        return personal_names(module, patterns)
    except ValueError as error:
        raise InvalidInput("personal", "patterns that fit the names in the task's model", error) from error


def _memories(module: nn.Module) -> list[tuple[torch.UntypedStorage, int]]:
    """The memories that `load_state` fills, with their sizes: each is the whole of one tensor and can be released.

    Views and tied weights keep pointing into them. Memory with another owner, such as a mapped file, is skipped.
    """
    memories = {}
    for tensor in state_tensors(module):
        memory = tensor.untyped_storage()
        if tensor.numel() and tensor.nbytes == memory.nbytes() and memory.resizable():
            memories[memory.data_ptr()] = (memory, memory.nbytes())
    return list(memories.values())


def with_own(
    name: str, options: Mapping[str, object], here: Mapping[str, object], listed: Collection[str]
) -> dict[str, object]:
    """A run's options of a task, with those of server.toml. The task's module is imported.

    here: of `task_options`. listed: as for `load_task`. Raises InvalidInput for an option that a run must not give;
    TaskError for a task that cannot be loaded.
    """
    foreign = (own_options(name, listed) | here.keys()) & options.keys()
    if foreign:
        option = min(foreign)
        raise InvalidInput(
            f"task.options.{option}",
            f"no value in a run: each machine has its own. On the coordinator set it in server.toml, [task_options]"
            f" {name!r} = {{ {option} = ... }}; on a device in client.toml",
            options[option],
        )
    return {**options, **here}
