"""Bundles for clients: encoded once, and sent from any offset."""

from __future__ import annotations

import pytest
import torch

from fl_server.aggregation.outgoing import Broadcast, Outgoing, make_broadcast
from protos.chunks import check_chunk
from protos.codec import Layout, digest_bytes, pack
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_DIRECTION, RESOURCE_KIND_MODEL, Chunk, ResourceKind

TENSORS = {"w": torch.arange(5, dtype=torch.float32)}
LAYOUT = Layout.of(TENSORS, trainable=["w"])


def broadcast_of(chunk_bytes: int = 8, kind: ResourceKind = RESOURCE_KIND_MODEL, layout: Layout = LAYOUT) -> Broadcast:
    """A broadcast of 20 bytes in chunks of 8: offsets 0, 8 and 16."""
    return make_broadcast(Outgoing(kind, TENSORS, layout), chunk_bytes)


def parts(broadcast: Broadcast, offset: int = 0) -> tuple[pb.ResourceHeader, list[Chunk]]:
    """Header and chunks from this offset, as a client reads them."""
    header, *rest = (
        pb.FetchModelResponse.FromString(broadcast.message(place)[0]) for place in broadcast.places(offset)
    )
    return header.header, [part.chunk for part in rest]


def test_a_broadcast_is_a_header_and_chunks() -> None:
    """The header has resource and manifest. The chunks pass their checks and are the packed tensors."""
    broadcast = broadcast_of()
    header, chunks = parts(broadcast)
    assert (header.resource, header.manifest) == (broadcast.resource, LAYOUT.to_manifest())
    data = b""
    for chunk in chunks:
        data += check_chunk(chunk, len(data), 8, 20)
    assert data == pack(TENSORS, LAYOUT)
    assert (header.resource.size_bytes, digest_bytes(header.resource.digest)) == (20, broadcast.digest)


@pytest.mark.parametrize(
    ("offset", "starts"),
    [(0, [0, 8, 16]), (7, [0, 8, 16]), (8, [8, 16]), (15, [8, 16]), (16, [16]), (19, [16]), (24, [])],
)
def test_sending_starts_at_the_chunk_that_contains_the_offset(offset: int, starts: list[int]) -> None:
    """The header is always sent."""
    header, chunks = parts(broadcast_of(), offset)
    assert header.manifest.size_bytes == 20
    assert [chunk.offset for chunk in chunks] == starts


def test_a_complete_download_gets_only_the_header() -> None:
    """With chunks of 10 bytes, nothing is left to send at offset 20."""
    assert len(broadcast_of(10).places(20)) == 1


def test_kind_and_digest_name_a_resource() -> None:
    """Both are readable text. The chunk size does not change the digest; a layout that trains nothing does."""
    broadcast = broadcast_of(kind=RESOURCE_KIND_DIRECTION)
    assert (broadcast.kind, broadcast.values_digest) == ("direction", broadcast.digest)
    assert broadcast_of(4).digest == broadcast_of(8).digest != broadcast_of(layout=Layout.of(TENSORS)).digest


@pytest.mark.parametrize(("place", "count"), [(0, 0), (1, 8), (2, 8), (3, 4)])
def test_a_message_counts_its_tensor_bytes(place: int, count: int) -> None:
    """Of 20 bytes the chunks have 8, 8 and 4, and the header has none."""
    broadcast = broadcast_of()
    message, counted = broadcast.message(place)
    assert counted == count
    assert len(pb.FetchModelResponse.FromString(message).chunk.data) == count
