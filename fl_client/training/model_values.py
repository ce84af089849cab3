"""Layouts of a model's bundles, and loading of a bundle's values into the model after a check of its layout."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from algorithms.base import Tensors
from algorithms.model_state import ModelState, fill, state_views, trainable_views
from fl_client.connection.bundles import Bundle, Layouts
from fl_client.errors import WorkFailed
from protos.codec import Layout, LayoutError, unpack
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2

Bundles = Mapping[tensor_pb2.ResourceKind, Bundle]
"""The bundles of an assignment, by kind."""


def layouts_of(model: nn.Module) -> Layouts:
    """The layouts of this model's bundles."""
    here = state_views(model)
    layouts = {
        tensor_pb2.RESOURCE_KIND_MODEL: Layout.of({**here.trainable, **here.buffers}, here.trainable.keys()),
        tensor_pb2.RESOURCE_KIND_DIRECTION: Layout.of(here.trainable, here.trainable.keys()),
    }
    return {**layouts, tensor_pb2.RESOURCE_KIND_FROZEN: Layout.of(here.frozen)} if here.frozen else layouts


def load(model: nn.Module, bundles: Bundles, *, keep_frozen: bool = False) -> Tensors:
    """Give the model the values of the round. Returns x, the trainable values in the bundle's memory, read only.

    keep_frozen: the frozen parameters are the model's own and stay. Raises WorkFailed when the layout is that of
    another model.
    """
    here = state_views(model)
    expected = {**here.trainable, **here.buffers}
    values = _tensors(bundles, tensor_pb2.RESOURCE_KIND_MODEL, Layout.of(expected, here.trainable.keys()))
    if keep_frozen:
        here = ModelState(here.trainable, here.buffers, {})
    frozen = _tensors(bundles, tensor_pb2.RESOURCE_KIND_FROZEN, Layout.of(here.frozen)) if here.frozen else {}
    trainable = {name: values[name] for name in here.trainable}
    fill(here, ModelState(trainable, {name: values[name] for name in here.buffers}, frozen))
    return trainable


def direction(model: nn.Module, bundles: Bundles) -> Tensors | None:
    """The direction bundle, if there is one. Raises WorkFailed for another layout than the trainable tensors'."""
    if tensor_pb2.RESOURCE_KIND_DIRECTION not in bundles:
        return None
    x = trainable_views(model)
    return _tensors(bundles, tensor_pb2.RESOURCE_KIND_DIRECTION, Layout.of(x, x.keys()))


def _tensors(bundles: Bundles, kind: tensor_pb2.ResourceKind, expected: Layout) -> Tensors:
    """The tensors of a bundle. Raises WorkFailed unless it has the expected layout."""
    name = tensor_pb2.ResourceKind.Name(kind)
    if (bundle := bundles.get(kind)) is None:
        raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"expected a resource {name}, the assignment has none")
    if difference := expected.difference(bundle.layout):
        raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"{name}, the model here against the coordinator's: {difference}")
    try:
        return unpack(bundle.data, bundle.layout)
    except LayoutError as error:
        raise WorkFailed(pb.FAILURE_REASON_LAYOUT, f"{name}: {error}") from error
