"""The task's model on the training device: a bundle's values, after a check of the layout; one step as a trial."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from algorithms.base import Tensors
from algorithms.batches import examples_of, to_device
from algorithms.model_state import ModelState, fill, state_views, trainable_views
from algorithms.optimizers.spec import PREFIX
from algorithms.precision import widened
from fl_client.connection.bundles.expected import Bundle, Layouts, ResourceKey, kind_of
from fl_client.errors import beyond_limits, other_layout
from fl_tasks.base import Task
from fl_tasks.batches import batches
from fl_tasks.data.forms import Data, forward_of
from fl_tasks.errors import TaskError
from protos.codec import Layout, LayoutError
from protos.digests import digest_text
from protos.fl.v1 import tensor_pb2
from protos.frozen import frozen_resource, frozen_text

Bundles = Mapping[ResourceKey, Bundle]
"""The bundles of an assignment, by kind, and by name if they have one."""


def layouts_of(model: nn.Module, personal: Collection[str] = (), *, own_frozen: bool = False) -> Layouts:
    """The layouts of this model's bundles.

    personal: names of the parameters and buffers that are personal. own_frozen: the model's own frozen parameters are
    not sent.
    """
    here = _received(model, personal, own_frozen=own_frozen)
    whole = Layout.of({**here.trainable, **here.buffers}, here.trainable.keys())
    layouts = {
        tensor_pb2.RESOURCE_KIND_MODEL: whole,
        tensor_pb2.RESOURCE_KIND_AVERAGED: whole,
        tensor_pb2.RESOURCE_KIND_DIRECTION: Layout.of(here.trainable, here.trainable.keys()),
        tensor_pb2.RESOURCE_KIND_OPTIMIZER: Layout.of(widened(here.trainable), here.trainable.keys()),
    }
    return {**layouts, tensor_pb2.RESOURCE_KIND_FROZEN: Layout.of(here.frozen)} if here.frozen else layouts


def load(
    model: nn.Module, bundles: Bundles, personal: Collection[str] = (), *, own_frozen: bool = False
) -> tuple[Tensors, Tensors]:
    """Give the model the values of the round. Returns x and the buffers, in the bundle's memory, read only.

    Personal parameters get their initial values. own_frozen: the model's own frozen parameters stay.

    Raises WorkFailed when the layout is that of another model.
    """
    here = _received(model, personal, own_frozen=own_frozen)
    expected = {**here.trainable, **here.buffers}
    values = _tensors(bundles, tensor_pb2.RESOURCE_KIND_MODEL, Layout.of(expected, here.trainable.keys()))
    frozen = _tensors(bundles, tensor_pb2.RESOURCE_KIND_FROZEN, Layout.of(here.frozen)) if here.frozen else {}
    trainable, buffers = ({name: values[name] for name in part} for part in (here.trainable, here.buffers))
    fill(here, ModelState(trainable, buffers, frozen))
    return trainable, buffers


def _received(model: nn.Module, personal: Collection[str], *, own_frozen: bool) -> ModelState:
    """Views of the values that a run sends."""
    here = state_views(model, personal)
    if not own_frozen:
        return here
    return replace(here, frozen={name: tensor for name, tensor in here.frozen.items() if name in personal})


def direction(model: nn.Module, bundles: Bundles, personal: Collection[str] = ()) -> Tensors | None:
    """The direction bundle, if there is one. Raises WorkFailed for another layout than the trainable tensors'."""
    if tensor_pb2.RESOURCE_KIND_DIRECTION not in bundles:
        return None
    x = trainable_views(model, personal)
    return _tensors(bundles, tensor_pb2.RESOURCE_KIND_DIRECTION, Layout.of(x, x.keys()))


def optimizer_state(model: nn.Module, bundles: Bundles, personal: Collection[str] = ()) -> dict[str, Tensors]:
    """The averaged state of the local optimizer, if the coordinator sent one, by its symbols.

    Raises WorkFailed for another layout than that of the trainable tensors in the state's dtypes.
    """
    keys = [key for key in bundles if isinstance(key, tuple)]
    if not keys:
        return {}
    x = widened(trainable_views(model, personal))
    layout = Layout.of(x, x.keys())
    return {f"{PREFIX}{key[1]}": _tensors(bundles, key, layout) for key in keys}


def _tensors(bundles: Bundles, kind: ResourceKey, expected: Layout) -> Tensors:
    """The tensors of a bundle. Raises WorkFailed unless it has the expected layout."""
    name = tensor_pb2.ResourceKind.Name(kind_of(kind))
    if (bundle := bundles.get(kind)) is None:
        raise other_layout(f"expected a resource {name}, the assignment has none")
    if difference := expected.difference(bundle.layout):
        raise other_layout(f"{name}, the model here against the coordinator's: {difference}")
    return {**bundle.tensors}


def read_tensors(file: Path) -> Tensors:
    """The tensors of a safetensors file. Raises WorkFailed."""
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise beyond_limits(f"{file.name}: {error}") from error


def names_of(layout: Layout) -> set[str]:
    """The names of a layout's tensors."""
    return {entry.name for entry in layout.entries}


def bundles_of(tensors: Tensors, layouts: Layouts) -> dict[ResourceKey, Bundle]:
    """Tensors of a file as the bundles of this model; others are left out. Raises WorkFailed if one is missing."""
    trainable, bundles = names_of(layouts[tensor_pb2.RESOURCE_KIND_DIRECTION]), dict[ResourceKey, Bundle]()
    for kind in (tensor_pb2.RESOURCE_KIND_MODEL, tensor_pb2.RESOURCE_KIND_FROZEN):
        names = names_of(layouts[kind]) if kind in layouts else set[str]()
        if missing := sorted(names - tensors.keys()):
            raise other_layout(f"expected {missing[0]}, which the model here has, got none")
        if names:
            values = {entry.name: tensors[entry.name] for entry in layouts[kind].entries}
            try:
                bundles[kind] = Bundle(Layout.of(values, trainable & names), values)
            except LayoutError as error:
                raise other_layout(f"the model that came: {error}") from error
    return bundles


class LocalModel:
    """A module and the frozen parameters that it was made with. For one thread at a time."""

    def __init__(
        self, make: Callable[[], nn.Module], prepare: Callable[[nn.Module], nn.Module] = lambda it: it
    ) -> None:
        """make: a new model of the task; prepare: moves it to the device, and may change how it computes."""
        self._make, self._prepare = make, prepare
        self._module: nn.Module | None = None
        self._own = True
        self._frozen: tensor_pb2.Resource | None = None

    @classmethod
    def of(cls, module: nn.Module) -> LocalModel:
        """A module that exists, with the frozen parameters that it has now."""
        return cls(lambda: module)

    def module(self) -> nn.Module:
        """The module, with the values of its last use."""
        if self._module is None:
            module = self._make()
            # Before the move to the device: on the CPU no tensor is copied for the digest.
            self._frozen, self._own = frozen_resource(state_views(module).frozen), True
            self._module = self._prepare(module)
        return self._module

    @property
    def frozen(self) -> tensor_pb2.Resource | None:
        """The frozen parameters that the task gives its model; None if there are none. Makes the module."""
        self.module()
        return self._frozen

    def release(self) -> None:
        """Forget the module. The next use makes it again."""
        self._module = None

    def replaced(self) -> None:
        """The module got the frozen parameters of a run, in place of its own."""
        self._own = False

    def with_own_frozen(self, wanted: tensor_pb2.Resource) -> nn.Module:
        """The module with the task's frozen parameters. Raises WorkFailed unless these are the wanted ones."""
        if not self._own:
            self.release()  # its memory is free before the new one is made
        module = self.module()
        if self._frozen is None or self._frozen.digest != wanted.digest:
            raise other_layout(
                f"local_frozen: expected the frozen parameters {digest_text(wanted.digest.value)}, got"
                f" {frozen_text(self._frozen) or 'none'} from the task's model() here: put the coordinator's files of"
                " them on this device, and restart the daemon"
            )
        return module


_BATCH = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of the trial step."""

    model_bytes: int
    """The size of all values of the model."""
    examples: int
    """The number of examples in the batch."""
    seconds: float
    loss: float


def trial_step(task: Task, data: Data, model: nn.Module, device: torch.device) -> Trial:
    """Train on one batch, without a step of an optimizer. The model is changed.

    model: on the device. Raises TaskError for a model that cannot be sent or changes its layout, and whatever the
    task's code raises.
    """
    try:
        before = layouts_of(model)
        began = time.monotonic()
        batch = to_device(next(batches(data, min(_BATCH, len(data)), seed=0, steps=1)), device)
        loss = task.loss(*forward_of(task)(model, batch))
        loss.backward()
        value, seconds = loss.item(), time.monotonic() - began
        after = layouts_of(model)
    except LayoutError as error:
        raise TaskError(f"the task's model cannot be sent: {error}") from error
    if changed := before[tensor_pb2.RESOURCE_KIND_MODEL].difference(after[tensor_pb2.RESOURCE_KIND_MODEL]):
        raise TaskError(
            f"the model changes in training: {changed}; parameters and buffers keep their shapes and types: keep what"
            " must change in a buffer with persistent=False"
        )
    size = sum(tensor.nbytes for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor))
    return Trial(size, examples_of(batch), seconds, value)
