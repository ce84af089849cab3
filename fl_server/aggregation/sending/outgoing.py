"""Tensors for clients in the run's encoding for their kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

import algorithms as fl
from fl_common.built_in import EDEN
from fl_server.aggregation.bundles import packed
from fl_server.aggregation.run_encodings import bundle_key, kind_name
from fl_server.aggregation.server_update import Diverged
from fl_server.errors import model_of
from fl_server.run_config import RunConfig
from protos.codec import Buffer, Layout
from protos.encodings import PLAIN, EncodedLayout, EncodingError, EncodingSpec, decode, encode
from protos.fl.v1.tensor_pb2 import (
    RESOURCE_KIND_AVERAGED,
    RESOURCE_KIND_DIRECTION,
    RESOURCE_KIND_MODEL,
    ResourceKind,
)

_HEADROOM, _LARGEST_SQUARED = 128.0, 1e18
"""Every encoding holds values below both: the dtype's maximum divided by the first, and the second, whose square is
finite in float32. EDEN's decoded values are at most 64 times as large as the largest of a block."""

_WORDS: Mapping[str, int] = MappingProxyType({"bf16": 2, "int8": 1, "int4": 1, "int2": 1})
"""Bytes of a word of differences, by encoding. In a plain bundle it is the size of most elements."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Tensors for clients, and their kind."""

    kind: ResourceKind
    tensors: fl.Tensors
    layout: Layout
    name: str = ""
    """Distinguishes tensors of one kind."""
    encoding: EncodingSpec = PLAIN
    key: bytes = b""
    """Of the random numbers of the encoding."""
    word: int = 0
    """Bytes of a word of the differences between two such bundles; 0: none are made."""

    @property
    def encoded(self) -> EncodedLayout:
        """The layout on the wire."""
        return EncodedLayout.of(self.layout, self.encoding)

    @property
    def digest(self) -> bytes:
        """The digest of the tensors without an encoding."""
        return self.layout.digest(packed(self.tensors, self.layout))

    def bundle(self) -> Buffer:
        """The bytes on the wire. Tensors in plain layout are not copied if there is no encoding."""
        if self.encoding == PLAIN:
            return packed(self.tensors, self.layout)
        return encode(self.tensors, self.encoded, self.key)

    def received(self, bundle: Buffer) -> fl.Tensors:
        """The values that clients get from the bytes on the wire."""
        return self.tensors if self.encoding == PLAIN else decode(bundle, self.encoded, self.key)


def in_encoding(outgoing: Outgoing, config: RunConfig, round_: int) -> Outgoing:
    """Tensors with the encoding and the differences that a run has for their kind. round_: under way."""
    encodings = {
        RESOURCE_KIND_MODEL: config.encodings.model,
        RESOURCE_KIND_AVERAGED: config.encodings.model,
        RESOURCE_KIND_DIRECTION: config.encodings.direction,
    }
    if outgoing.kind not in encodings:
        return outgoing
    name = encodings[outgoing.kind]
    # EDEN rotates with other signs in each round, so two of its bundles have nothing in common.
    # Clients that evaluate an averaged model have seldom the one before.
    once = name in EDEN or outgoing.kind == RESOURCE_KIND_AVERAGED
    differs = config.encodings.difference == "previous" and not once
    outgoing = replace(outgoing, word=_word(outgoing.layout, name) if differs else 0)
    if name == PLAIN.name:
        return outgoing
    return replace(outgoing, encoding=EncodingSpec(name), key=bundle_key(config, outgoing.kind, round_))


def _word(layout: Layout, encoding: str) -> int:
    """Bytes of a word of differences between two bundles of a layout in an encoding."""
    if encoding in _WORDS:
        return _WORDS[encoding]
    sizes = {entry.dtype.itemsize: 0 for entry in layout.entries} or {1: 0}
    for entry in layout.entries:
        sizes[entry.dtype.itemsize] += entry.nbytes
    return max(sizes, key=lambda size: sizes[size])


def check_encodable(outgoing: Outgoing, after: int) -> None:
    """Raises Diverged if the encoding cannot hold the values. after: the round that computed them."""
    if outgoing.encoding == PLAIN or all(
        _small(outgoing.tensors[entry.name]) for entry in outgoing.layout.entries if entry.trainable
    ):
        return
    try:
        outgoing.bundle()
    except EncodingError as error:
        raise Diverged(
            f"the {kind_name(outgoing.kind)} after round {after} cannot be sent as {outgoing.encoding.name}: {error}; "
            f"{model_of(after - 1)} stays. Lower the learning rate"
        ) from error


def _small(tensor: torch.Tensor) -> bool:
    """Whether every encoding holds the tensor's values, which is cheap to find out."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    least, greatest = torch.aminmax(tensor)
    return max(-float(least), float(greatest)) < min(torch.finfo(tensor.dtype).max / _HEADROOM, _LARGEST_SQUARED)
