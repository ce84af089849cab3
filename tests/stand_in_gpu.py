"""A stand-in for a GPU: tensors that say they are on `cuda:0`, and whose values are in memory of the host.

It shows on a CPU what a program for a GPU does apart from speed: which values the host waits for, what it uploads, and
whether a step can be recorded. A recording is the list of its operations on fixed memory, as a CUDA graph is: played
again, none of its Python code runs. As in CUDA a recorded step must not wait for a value or upload one, a recording
must not outlive the memory that it works on, and a pool of memory ends with its last recording.
Not shown are kernels, streams that run side by side, and how much memory there is.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

GPU = torch.device("cuda", 0)
META = torch.device("meta")
THERE = ("cuda", "meta")
ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("algorithms", "fl_client", "fl_ops", "fl_server", "fl_tasks")
ATEN: Any = torch.ops.aten
COPIES = ("copy_", "_foreach_copy_")
TAKES_INDICES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class There(Tensor):
    """A tensor on the stand-in. `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Self:
        """Wrap a tensor of the host."""
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=META,
        )
        made.held = held
        key = _storage(held)
        _USERS[key] += 1
        weakref.finalize(made, _USERS.subtract, [key])
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"There({self.held!r})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """That which the program knows; torch's own code, which has none for CUDA here, finds `meta`."""
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """As `device`."""
        return True

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As of any tensor: a tensor that is there already is not copied."""
        kept: list[Any] = [one.dtype if isinstance(one, There) else one for one in args if not _is_gpu(one)]
        named = {name: value for name, value in kwargs.items() if not _is_gpu(value)}
        if not {*map(type, [*kept, *named.values()])} & {torch.dtype, torch.device, str} and not named.get("copy"):
            return self
        return super().to(*kept, **named)

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """Numbers of the host, uploaded."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=GPU)

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    def data_ptr(self) -> int:
        """Of the values."""
        return self.held.data_ptr()

    def tolist(self) -> Any:
        """As of any tensor of a GPU: from a copy of the host."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func}: expected the stand-in to be in use")


_USERS: Counter[int] = Counter()
"""Tensors on the stand-in by the memory that they are in."""


def _is_gpu(value: object) -> bool:
    return isinstance(value, torch.device | str) and torch.device(value).type == "cuda"


def _indices(index: Any) -> Any:
    """An index in which lists are tensors: torch uploads them."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index, device=GPU) if isinstance(index, list) else index


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class StandIn(TorchDispatchMode):
    """Does the operations of the stand-in, and counts what crosses between it and the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []
        """The places in the program that waited for the stand-in: they read values of it, or sent it some at once."""
        self.uploads: list[str] = []
        """Those that sent it values of the host and went on."""
        self.pinned: list[str] = []
        """The places that made tensors of the host in pinned memory."""
        self.recording: Graph | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", None):
            self.pinned.append(_place())
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, There)]
        to = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if not there and to not in THERE:
            return func(*args, **kwargs)
        stays = to in THERE or (to is None and func is not ATEN._local_scalar_dense.default)
        if _name(func) in COPIES:
            stays = isinstance(pytree.tree_leaves(args[0])[0], There)
        self._check(func, tensors, stays=stays, waits=not kwargs.get("non_blocking"))
        held_args, held_kwargs = pytree.tree_map_only(There, lambda it: it.held, (args, kwargs))
        if to is not None:
            held_kwargs["device"] = torch.device("cpu")
        found = func(*held_args, **held_kwargs)
        if not stays:
            return found
        if self.recording is not None:
            self.recording.add(func, held_args, held_kwargs, found)
        wrapped = pytree.tree_map_only(Tensor, There, found)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped

    def _check(self, func: Any, tensors: Sequence[Tensor], *, stays: bool, waits: bool) -> None:
        """Count the values that cross. Raises RuntimeError for what torch refuses."""
        if any(tensor.is_meta and not isinstance(tensor, There) for tensor in tensors):
            raise AssertionError(f"{func}: a tensor has lost its values")
        here = [tensor for tensor in tensors if not isinstance(tensor, There)]
        whole = [tensor for tensor in here if tensor.dim()]  # a number of the host is a part of the call
        if not stays:
            self._cross(self.waits, "waits for a value")
        elif here and _name(func) == "_to_copy":
            self._cross(self.waits if waits else self.uploads, "uploads a value")
        elif whole and _name(func) in (*COPIES, *TAKES_INDICES):
            self._cross(self.waits, "uploads a value")
        elif whole:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu")

    def _cross(self, places: list[str], what: str) -> None:
        places.append(_place())
        if self.recording is not None:
            self.recording.invalid = True
            raise RuntimeError(f"operation not permitted when stream is capturing: it {what}")


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _place() -> str:
    """The innermost function with a name of the product that runs, as "module.py:function"."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if frame.name[0] == "<":
            continue
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
            return f"{path.relative_to(ROOT)}:{frame.name}"
    return "tests"


class Graph:
    """A recording: stands for `torch.cuda.CUDAGraph`."""

    core: StandIn
    """Set while the stand-in is in use."""
    numbers = itertools.count(1)
    living: ClassVar[Counter[int]] = Counter()
    """Recordings by pool."""

    def __init__(self) -> None:
        self._made: list[tuple[Callable[..., Any], Any, Any, list[Tensor | None]]] = []
        self._own: set[int] = set()
        """Memory that was allocated while it was recorded."""
        self._others: set[int] = set()
        self._pool = 0
        self.invalid = False

    def capture_begin(self, pool: int = 0, **_: object) -> None:
        """Begin to record. Raises RuntimeError for a pool without a recording."""
        if pool and not Graph.living[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: the pool has ended with its last recording")
        self._pool = pool or next(Graph.numbers)
        Graph.living[self._pool] += 1
        weakref.finalize(self, Graph.living.subtract, [self._pool])
        Graph.core.recording = self

    def capture_end(self) -> None:
        """End the recording. Raises RuntimeError if something that is not permitted was tried."""
        Graph.core.recording = None
        if self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def pool(self) -> int:
        """Its memory."""
        return self._pool

    def add(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Record an operation that was made. A number of the host is a part of the recording."""
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {_storage(tensor) for tensor in inputs}
        self._others |= known - self._own
        outputs = [leaf if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(found)]
        results = [None if it is None or _storage(it) in known else it for it in outputs]
        self._own |= {_storage(tensor) for tensor in results if tensor is not None}
        self._made.append((func, args, kwargs, results))

    def replay(self) -> None:
        """Do the same in the same memory."""
        if Graph.core.recording is not None:
            raise RuntimeError("a recording cannot be played in another one")
        if any(_USERS[storage] <= 0 for storage in self._others):
            raise RuntimeError("a recording outlived memory that it works on")
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            for func, args, kwargs, results in self._made:
                for result, value in zip(results, pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                    if result is not None:
                        result.copy_(value)


class Stream:
    """Stands for `torch.cuda.Stream`. All work is done in the order of its calls."""

    def __init__(self, device: object = None) -> None:
        self.device = GPU

    def wait_stream(self, other: Stream) -> None:
        """There is nothing to wait for."""


class Cuda:
    """What stands for functions of `torch.cuda`."""

    def __init__(self, core: StandIn) -> None:
        self._core, self._here = core, Stream()

    def current_stream(self, device: object = None) -> Stream:
        """The stream of this thread."""
        return self._here

    def set_stream(self, stream: Stream) -> None:
        """Use a stream from now on."""
        self._here = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Use a stream within the context. As torch's, it changes nothing back if its end is not reached."""
        before, self._here = self._here, stream
        yield
        self._here = before

    def get_rng_state(self, device: object = None) -> Tensor:
        """Of the generator, which is the host's here."""
        if self._core.recording is not None:
            self._core.recording.invalid = True
            raise RuntimeError("the state of a generator cannot be read when stream is capturing")
        return torch.default_generator.get_state()


def _replaced(core: StandIn) -> dict[str, Any]:
    """What stands for the names of `torch.cuda`."""
    cuda = Cuda(core)
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "stand-in",
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
        "memory_reserved": lambda device=None: sum(Graph.living.values()) << 20,
        "manual_seed": torch.default_generator.manual_seed,
        "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state),
        "get_rng_state": cuda.get_rng_state,
        "Stream": Stream,
        "current_stream": cuda.current_stream,
        "set_stream": cuda.set_stream,
        "stream": cuda.stream,
        "CUDAGraph": Graph,
    }


@contextmanager
def in_use() -> Iterator[StandIn]:
    """Within the context `cuda:0` is the stand-in."""
    core, before = StandIn(), torch._C._only_lift_cpu_tensors()
    Graph.core = core
    with pytest.MonkeyPatch.context() as patched:
        for name, stand_in in _replaced(core).items():
            patched.setattr(torch.cuda, name, stand_in)
        patched.setattr(torch.cuda.graph, "default_capture_stream", None)
        patched.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        torch._C._ensureCUDADeviceGuardSet()  # autograd asks for the device of its leaves
        torch._C._set_only_lift_cpu_tensors(True)  # a tensor of numbers is uploaded by an operation that can be seen
        try:
            with core:
                yield core
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
