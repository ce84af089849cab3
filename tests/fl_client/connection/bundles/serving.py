"""A coordinator's broadcasts as a device fetches them, without a network."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import torch

from fl_client.connection.bundles.cache import BundleCache
from fl_client.connection.bundles.expected import Layouts
from fl_client.connection.link import Link, RetryDelays, Session
from fl_client.connection.transport import Fetched, GrpcTransport, _fetched
from fl_client.errors import ResourceGone
from fl_server.aggregation.outgoing import Broadcast, Outgoing, in_encoding, make_broadcast
from fl_server.run_settings.spec import from_values
from protos.chunks import encode_chunk, encode_fetch_header
from protos.codec import Layout, pack
from protos.encodings import EncodedLayout, EncodingSpec, decode
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import (
    ENCODING_PLAIN,
    RESOURCE_KIND_DIRECTION,
    RESOURCE_KIND_MODEL,
    Manifest,
    Resource,
    ResourceKind,
)

VALUES = torch.randn(3000, generator=torch.Generator().manual_seed(1))
LAYOUT = Layout.of({"w": VALUES}, trainable=["w"])
LAYOUTS: Layouts = {RESOURCE_KIND_MODEL: LAYOUT, RESOURCE_KIND_DIRECTION: LAYOUT}
CHUNK = 500


def sent(
    moved: float, before: Broadcast | None, model: str = "int8", kind: ResourceKind = RESOURCE_KIND_MODEL
) -> Broadcast:
    """What a coordinator sends of a round, whose number is 1000 times as large as the move of the values."""
    encodings = {"model": model, "direction": model, "difference": "previous"}
    config = from_values({"task": {"name": "digits"}, "encodings": encodings})
    plain = Outgoing(kind, {"w": VALUES + moved}, LAYOUT)
    return make_broadcast(in_encoding(plain, config, round(moved * 1000)), CHUNK, before)


class Serving(GrpcTransport):
    """A connection to a coordinator that sends these broadcasts. `broken`: other bytes, or an error, by digest."""

    def __init__(self, *broadcasts: Broadcast) -> None:
        self.broadcasts = broadcasts
        self.fetched: list[tuple[bytes, int]] = []
        """Digests and offsets."""
        self.broken: dict[bytes, bytes | Exception] = {}

    async def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
        """The messages of the resource."""
        digest = request.digest.value
        self.fetched.append((digest, request.offset))
        for message in self._messages(digest, request.offset):
            yield _fetched(message, header_bytes)

    def _messages(self, digest: bytes, offset: int) -> list[bytes]:
        if isinstance(data := self.broken.get(digest), Exception):
            raise data
        if data is not None:
            manifest = Manifest(size_bytes=len(data), encoding=ENCODING_PLAIN)
            return [encode_fetch_header(Resource(), manifest), encode_chunk(data, 0, len(data))]
        found = next((each for one in self.broadcasts if (each := one.named(digest)) is not None), None)
        if found is None:
            raise ResourceGone("gone")
        return [found.message(place)[0] for place in found.places(offset)]


class Device:
    """A device that fetches from a coordinator."""

    def __init__(self, *broadcasts: Broadcast) -> None:
        self.connection = Serving(*broadcasts)
        link = Link(RetryDelays(first=0.0001, longest=0.0002))
        link.open(Session("s", self.connection, CHUNK, 1 << 20))
        self.bytes: list[int] = []
        self.cache = BundleCache(link, 1 << 20, self.bytes.append)

    async def get(self, *resources: Resource) -> list[bytes]:
        """The bundles of an assignment."""
        return [
            bytes(pack(bundle.tensors, bundle.layout)) for bundle in (await self.cache.get(resources, LAYOUTS)).values()
        ]

    def fetches(self) -> list[bytes]:
        """The digests that were fetched since the last call."""
        found = [digest for digest, _ in self.connection.fetched]
        self.connection.fetched.clear()
        return found


def values(broadcast: Broadcast, model: str = "int8") -> bytes:
    """The bytes of the bundle without an encoding."""
    if model == "plain":
        return bytes(broadcast.bundle)
    encoded = EncodedLayout.of(LAYOUT, EncodingSpec(model))
    return bytes(pack(decode(broadcast.bundle, encoded, broadcast.resource.encoding_key), LAYOUT))


def digest_of_difference(broadcast: Broadcast) -> bytes:
    """The digest of the difference that is sent beside a bundle."""
    assert broadcast.difference is not None
    return broadcast.difference.digest
