"""The byte layout of an exchange's update: its payloads, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import algorithms as fl
from fl_server.aggregation.blocks import Source
from protos.codec import Entry, Layout
from protos.encodings import PLAIN, EncodedLayout, EncodingSpec
from protos.fl.v1.tensor_pb2 import Manifest
from protos.fl.v1.training_pb2 import PayloadKind
from protos.wire import payload_kind, payload_name

_NONE: Mapping[fl.Payload, Layout] = MappingProxyType({})


@dataclass(frozen=True)
class PayloadShape:
    """One payload's position in an update."""

    payload: fl.Payload
    layout: Layout
    """Offsets from the start of the payload, without an encoding."""
    base: int
    """Bytes before it in the update, without an encoding."""
    encoding: EncodingSpec = PLAIN
    encoded_base: int = 0
    """Bytes before it in the file of an encoded update."""

    @property
    def kind(self) -> PayloadKind:
        """The kind on the wire."""
        return payload_kind(self.payload)

    @property
    def name(self) -> str:
        """The name on the wire, of a payload of the kind NAMED."""
        return payload_name(self.payload)

    @cached_property
    def encoded(self) -> EncodedLayout:
        """Its layout on the wire and in its file, with offsets from the start of the payload."""
        return EncodedLayout.of(self.layout, self.encoding)

    @cached_property
    def manifest(self) -> Manifest:
        """Its manifest in a header."""
        return self.encoded.to_manifest()

    @cached_property
    def placed(self) -> Layout:
        """Its layout with offsets from the start of the update, without an encoding, for reading its values."""
        entries = tuple(replace(entry, offset=entry.offset + self.base) for entry in self.layout.entries)
        return Layout(entries, self.layout.size_bytes + self.base)


@dataclass(frozen=True)
class UpdateShape:
    """The payloads of an exchange, in the exchange's order."""

    payloads: tuple[PayloadShape, ...]

    @staticmethod
    def of(
        payloads: Sequence[fl.Payload],
        model: Layout,
        trainable: Layout,
        wide: Mapping[fl.Payload, Layout] = _NONE,
    ) -> UpdateShape:
        """Deltas are laid out as the model, buffers included; every other payload as its trainable tensors alone.

        wide: the layouts of payloads that are not in the model's dtypes.
        """
        shapes: list[PayloadShape] = []
        base = 0
        for payload in payloads:
            layout = model if payload == "delta" else wide.get(payload, trainable)
            shapes.append(PayloadShape(payload, layout, base))
            base += layout.size_bytes
        return UpdateShape(tuple(shapes))

    def encoded_as(self, encoding: EncodingSpec) -> UpdateShape:
        """The same update in an encoding; some payloads stay plain (`EncodingSpec.of_payload`)."""
        shapes: list[PayloadShape] = []
        base = 0
        for payload in self.payloads:
            shapes.append(replace(payload, encoding=encoding.of_payload(payload.payload), encoded_base=base))
            base += shapes[-1].encoded.size_bytes
        return UpdateShape(tuple(shapes))

    @cached_property
    def size_bytes(self) -> int:
        """Size of the whole update on the wire and in its file."""
        return sum(shape.encoded.size_bytes for shape in self.payloads)

    @property
    def plain(self) -> bool:
        """Whether the values in the file need no decoding."""
        return all(shape.encoding == PLAIN for shape in self.payloads)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All tensors, with offsets from the start of the update."""
        return tuple(entry for shape in self.payloads for entry in shape.placed.entries)

    @property
    def trains(self) -> bool:
        """Whether the update has a delta."""
        return any(shape.payload == "delta" for shape in self.payloads)

    def only(self, names: Collection[str]) -> UpdateShape:
        """The same update with these tensors only; their offsets stay."""
        wanted = set(names)
        return UpdateShape(tuple(replace(shape, layout=_only(shape.layout, wanted)) for shape in self.payloads))

    def layout_of(self, payload: fl.Payload) -> Layout:
        """The layout of a payload's tensors in the update. Raises KeyError for another payload."""
        for shape in self.payloads:
            if shape.payload == payload:
                return shape.placed
        raise KeyError(f"expected one of {[shape.payload for shape in self.payloads]}, got {payload}")


@dataclass(frozen=True, slots=True)
class AcceptedUpdates:
    """The accepted updates of an exchange, in the order of client id bytes."""

    cohort: Sequence[fl.UpdateInfo]
    sources: Sequence[Source]
    shape: UpdateShape

    def only(self, names: Collection[str]) -> AcceptedUpdates:
        """The same updates with these tensors only."""
        return replace(self, shape=self.shape.only(names))


def _only(layout: Layout, names: Collection[str]) -> Layout:
    return replace(layout, entries=tuple(entry for entry in layout.entries if entry.name in names))
