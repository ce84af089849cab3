"""A bundle as the device holds it, and the names of resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protos import codec
from protos.fl.v1 import tensor_pb2

ResourceKey = tensor_pb2.ResourceKind | tuple[tensor_pb2.ResourceKind, str]
"""The kind of a resource, and its name if it has one."""

Layouts = Mapping[tensor_pb2.ResourceKind, codec.Layout]
"""Layouts of the bundles of this device's own model, by kind."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Named tensors as bytes."""

    layout: codec.Layout
    data: memoryview


def key_of_resource(resource: tensor_pb2.Resource) -> ResourceKey:
    """The key of a resource among those of an assignment."""
    return (resource.kind, resource.name) if resource.name else resource.kind
