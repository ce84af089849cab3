"""What is sent out: encoded once, and from any offset on."""

from __future__ import annotations

import pytest
import torch

from fl_server.broadcast import Outgoing, make_broadcast
from protos.chunks import check_chunk
from protos.codec import Layout, digest_bytes, pack
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_DIRECTION, RESOURCE_KIND_MODEL

TENSORS = {"w": torch.arange(5, dtype=torch.float32)}
LAYOUT = Layout.of(TENSORS, trainable=["w"])


def made(chunk_bytes=8, kind=RESOURCE_KIND_MODEL, layout=LAYOUT):
    """Twenty bytes in chunks of eight: 0, 8 and 16."""
    return make_broadcast(Outgoing(kind, TENSORS, layout), chunk_bytes)


def parts(broadcast, offset=0):
    """Header and chunks from an offset on, as a client reads them."""
    header, *rest = (
        pb.FetchModelResponse.FromString(broadcast.message(place)[0]) for place in broadcast.places(offset)
    )
    return header.header, [part.chunk for part in rest]


def test_the_whole_is_header_and_chunks():
    """The header names resource and manifest; the chunks, checked, are the packed tensors."""
    broadcast = made()
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
def test_an_offset_begins_at_the_border_at_or_below_it(offset, starts):
    """The header comes every time."""
    header, chunks = parts(made(), offset)
    assert header.manifest.size_bytes == 20
    assert [chunk.offset for chunk in chunks] == starts


def test_a_whole_one_of_even_chunks_needs_only_its_header():
    """Ten bytes a chunk: at 20 nothing is left to send."""
    assert len(made(10).places(20)) == 1


def test_names_of_resources():
    """Kind in a word, digest as people read it; the same numbers, frozen, are another resource."""
    broadcast = made(kind=RESOURCE_KIND_DIRECTION)
    assert (broadcast.kind, broadcast.text) == ("direction", f"blake3:{broadcast.digest.hex()}")
    assert made(4).digest == made(8).digest != made(layout=Layout.of(TENSORS)).digest


@pytest.mark.parametrize(("place", "count"), [(0, 0), (1, 8), (2, 8), (3, 4)])
def test_a_message_says_how_much_of_the_tensors_is_in_it(place, count):
    """What is counted as sent: eight, eight and the four that are left of twenty, and nothing of the header."""
    broadcast = made()
    message, found = broadcast.message(place)
    assert found == count
    assert len(pb.FetchModelResponse.FromString(message).chunk.data) == count
