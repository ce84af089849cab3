"""What a bundle must be: a resource with the layout of this device's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fl_client.errors import beyond_limits, other_layout, unsupported
from fl_client.storage.pending_updates import name_of
from protos import codec
from protos.encodings import PLAIN, EncodedLayout, EncodingError, EncodingSpec, decode
from protos.encodings.random_words import KEY_BYTES
from protos.fl.v1 import tensor_pb2

ResourceKey = tensor_pb2.ResourceKind | tuple[tensor_pb2.ResourceKind, str]
"""The kind of a resource, and its name if it has one."""

Layouts = Mapping[tensor_pb2.ResourceKind, codec.Layout]
"""Layouts of the bundles of this device's own model, by kind."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Named tensors, which are not to be changed: views of the bytes that came, or the tensors of a simulation."""

    layout: codec.Layout
    tensors: dict[str, Tensor]


def key_of_resource(resource: tensor_pb2.Resource) -> ResourceKey:
    """The key of a resource among those of an assignment."""
    return (resource.kind, resource.name) if resource.name else resource.kind


def kind_of(key: ResourceKey) -> tensor_pb2.ResourceKind:
    """The kind of a resource."""
    return key[0] if isinstance(key, tuple) else key


def key_text(key: ResourceKey) -> list[Any]:
    """The key of a bundle in JSON."""
    return list(key) if isinstance(key, tuple) else [key, ""]


def key_of(text: Sequence[Any]) -> ResourceKey:
    """The key of `key_text`."""
    number: Any = int(text[0])
    return (number, str(text[1])) if text[1] else number


COMPARED_BYTES = 64 << 10
"""A bundle of the wrong size is fetched, to name the difference in its manifest, up to twice the right size plus this.
A larger one is refused at once."""

HEADER_BYTES = 64 << 10
"""Size of a header, in addition to twice the expected manifest."""


@dataclass(frozen=True, slots=True)
class ExpectedBundle:
    """A resource, and its layout by this device's model."""

    resource: tensor_pb2.Resource
    encoded: EncodedLayout
    run_id: str = ""
    """Run of the assignment."""

    @property
    def digest(self) -> tensor_pb2.Digest:
        """The digest to ask for."""
        return self.resource.digest

    @property
    def size_bytes(self) -> int:
        """Bytes of the bundle."""
        return self.encoded.size_bytes

    @property
    def header_bytes(self) -> int:
        """Largest header that is parsed: a parsed manifest takes many times its size."""
        return HEADER_BYTES + 2 * self.encoded.manifest.ByteSize()

    def has_digest(self, data: memoryview) -> bool:
        """Whether some bytes are the bundle."""
        return self.encoded.digest(data) == codec.digest_bytes(self.digest)

    def check(self, manifest: tensor_pb2.Manifest) -> None:
        """Raises WorkFailed if the manifest is not the expected one."""
        encoded, limit = self.encoded, _comparable(self.encoded.size_bytes)
        if manifest == encoded.manifest:
            return  # exactly as expected; the code below finds the difference otherwise
        if encoded.spec == PLAIN:
            try:
                difference = encoded.layout.difference(codec.Layout.from_manifest(manifest, limit))
            except codec.LayoutError as error:
                raise other_layout(f"manifest: {error}") from None
        else:
            difference = encoded.difference_from(manifest, limit)
        if difference:
            name = kind_text(self.resource)
            raise other_layout(f"{name}, the model here against the coordinator's: {difference}")

    def decoded(self, data: memoryview) -> Bundle:
        """The bundle of a resource's bytes. Raises WorkFailed if the encoding does not have such bytes."""
        layout, resource = self.encoded.layout, self.resource
        try:
            if self.encoded.spec != PLAIN:
                data = codec.pack(decode(data, self.encoded, resource.encoding_key), layout)
            return Bundle(layout, codec.unpack(data, layout))
        except (EncodingError, codec.LayoutError) as error:
            raise other_layout(f"{kind_text(resource)}: {error}") from error


class ExpectedBundles:
    """The resources of assignments with the layouts of this device's model."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._encoded: dict[tensor_pb2.ResourceKind, EncodedLayout] = {}
        """The latest layouts: those of the rounds of a run are equal, and are computed once."""

    def of(self, resource: tensor_pb2.Resource, layouts: Layouts, run_id: str = "") -> ExpectedBundle:
        """What a resource must be. Raises WorkFailed unless encoding, size and kind fit this device and its model."""
        spec = _encoding_of(resource)  # its error comes first
        if resource.size_bytes > self._max_bytes:
            raise beyond_limits(
                f"expected a bundle of at most {self._max_bytes} bytes (max_bundle_bytes), got {resource.size_bytes}"
            )
        if resource.kind not in layouts:
            raise other_layout(f"expected no resource of kind number {resource.kind}: this model has none")
        encoded = self._encoding(resource.kind, layouts[resource.kind], spec)
        if resource.size_bytes > _comparable(encoded.size_bytes):
            raise other_layout(
                f"{kind_text(resource)}: expected {encoded.size_bytes} bytes for the model here, got "
                f"{resource.size_bytes}"
            )
        try:
            codec.digest_bytes(resource.digest)
        except ValueError as error:
            raise unsupported(f"resource: {error}") from None
        return ExpectedBundle(resource, encoded, run_id)

    def _encoding(self, kind: tensor_pb2.ResourceKind, layout: codec.Layout, spec: EncodingSpec) -> EncodedLayout:
        known = self._encoded.get(kind)
        if known is None or known.layout is not layout or known.spec != spec:
            known = self._encoded[kind] = EncodedLayout.of(layout, spec)
        return known


def _encoding_of(resource: tensor_pb2.Resource) -> EncodingSpec:
    """Raises WorkFailed for an encoding that this device cannot read, or a wrong key."""
    try:
        encoding = EncodingSpec.from_wire(resource.encoding or tensor_pb2.ENCODING_PLAIN)
    except ValueError as error:
        raise unsupported(f"{kind_text(resource)}: {error}") from None
    if len(resource.encoding_key) != (0 if encoding == PLAIN else KEY_BYTES):
        raise unsupported(
            f"{kind_text(resource)}: expected an encoding_key of {KEY_BYTES} bytes, or none with PLAIN, got "
            f"{len(resource.encoding_key)}"
        )
    return encoding


def _comparable(size_bytes: int) -> int:
    """Largest bundle whose manifest is read, to name how it differs from the expected one of `size_bytes`."""
    return 2 * size_bytes + COMPARED_BYTES


def kind_text(resource: tensor_pb2.Resource) -> str:
    """The kind of a resource, for messages."""
    return name_of(tensor_pb2.ResourceKind, resource.kind)
