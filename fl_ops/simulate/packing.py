"""Packs what the server sends as the bundles that simulated clients load."""

from __future__ import annotations

from typing import NamedTuple

from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_ops.simulate.traffic import Name
from fl_server.aggregation.outgoing import Outgoing
from protos.codec import pack
from protos.encodings import PLAIN


class Packed(NamedTuple):
    """A bundle for clients."""

    name: Name
    digest: bytes
    size: int
    """Bytes on the wire."""
    sent: memoryview
    """These bytes."""
    bundle: Bundle
    """What clients load."""


def packed(outgoing: Outgoing) -> Packed:
    """The bundle of tensors for clients, with their encoding."""
    key: ResourceKey = (outgoing.kind, outgoing.name) if outgoing.name else outgoing.kind
    plain, layout = outgoing.encoding == PLAIN, outgoing.layout
    sent = pack(outgoing.tensors, layout) if plain else memoryview(outgoing.bundle())
    digest = outgoing.encoded.digest(sent)
    bundle = Bundle(layout, sent if plain else pack(outgoing.received(sent), layout))
    return Packed((key, digest + outgoing.key), digest, outgoing.encoded.size_bytes, sent, bundle)
