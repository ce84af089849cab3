"""Bundles on their way down, chunk by chunk."""

from __future__ import annotations

import asyncio

import pytest
import torch

from fl_client.bundles import BundleCache, Download
from fl_client.errors import BrokenTransfer, WorkFailed
from fl_client.link import Backoff, Link, Session, Waits
from protos import codec
from protos.chunks import read_chunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2

LAYOUT = codec.Layout.of({"w": torch.arange(64.0)})
DATA = bytes(codec.pack({"w": torch.arange(64.0)}, LAYOUT))  # 256 bytes
RESOURCE = tensor_pb2.Resource(
    kind=tensor_pb2.RESOURCE_KIND_MODEL, digest=codec.digest_message(LAYOUT.digest(DATA)), size_bytes=len(DATA)
)


class Scripted:
    """A connection whose fetches yield the spans of a script, one list after the other."""

    def __init__(self, *spans, form=lambda message: message):
        self.spans = list(spans)
        self.offsets = []
        self.form = form

    async def fetch(self, request):
        """The next list of (offset, length)."""
        self.offsets.append(request.offset)
        yield pb.FetchModelResponse(header=pb.ResourceHeader(resource=RESOURCE, manifest=LAYOUT.to_manifest()))
        for offset, length in self.spans.pop(0):
            yield self.form(pb.FetchModelResponse(chunk=codec.make_chunk(DATA, offset, length)))


def link_to(connection):
    """A link whose session is open."""
    link = Link(Waits(first=0.001, longest=0.002))
    link.open(Session("s", connection, 64, 128))
    return link


async def test_a_fetch_takes_over_chunks_of_another_size():
    """100 bytes are here when chunks become 64 bytes: the coordinator goes on at its border, 64, and all is right."""
    connection = Scripted([(0, 100)], [(64, 64), (128, 128)])
    cache = BundleCache(link_to(connection), 1 << 20, lambda count: None)
    bundles = await cache.get([RESOURCE])
    assert connection.offsets == [0, 100]
    assert bundles[tensor_pb2.RESOURCE_KIND_MODEL].data == DATA


async def test_chunks_that_are_read_where_they_lie_are_the_same():
    """The form in which a coordinator's chunks come off the wire."""
    connection = Scripted(
        [(0, 100), (100, 128), (228, 28)], form=lambda message: read_chunk(message.SerializeToString())
    )
    bundles = await BundleCache(link_to(connection), 1 << 20, lambda count: None).get([RESOURCE])
    assert bundles[tensor_pb2.RESOURCE_KIND_MODEL].data == DATA


async def test_two_that_want_the_same_fetch_it_once():
    """Training and evaluation of one model, asked for at the same moment."""
    connection = Scripted([(0, 128), (128, 128)])
    cache = BundleCache(link_to(connection), 1 << 20, lambda count: None)
    first, second = await asyncio.gather(cache.get([RESOURCE]), cache.get([RESOURCE]))
    assert connection.offsets == [0]
    assert first[tensor_pb2.RESOURCE_KIND_MODEL] is second[tensor_pb2.RESOURCE_KIND_MODEL]


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(64, 64)], "expected a chunk at offset 0, got offset 64"),
        ([(0, 64), (128, 64)], "expected a chunk at offset 64, got offset 128"),
        ([(0, 64), (0, 64)], "expected a chunk at offset 64, got offset 0"),
        ([(0, 200)], "at most 128 bytes"),
        ([(0, 128)], "ended at byte 128 of 256"),
    ],
)
async def test_a_stream_that_is_not_in_order_is_broken(spans, words):
    """A gap, a step back, a chunk over the limit and an early end are all told apart."""
    download = Download(RESOURCE, memoryview(bytearray(RESOURCE.size_bytes)), Backoff(Waits()), lambda count: None)
    with pytest.raises(BrokenTransfer, match=words):
        await download.go_on(Session("s", Scripted(spans), 64, 128))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size_bytes": 4096}, "at most 1024 bytes"),
        ({"encoding": 2}, "encoding PLAIN"),
        ({"digest": tensor_pb2.Digest(value=b"short")}, "digest of 32 bytes, got 5"),
        ({"size_bytes": 100}, "manifest: "),
        ({"size_bytes": 260}, "expected 260 bytes as the assignment says, got 256"),
    ],
)
async def test_a_resource_that_cannot_be_held_or_read_is_refused(changes, words):
    """Size, encoding and digest are looked at before memory is taken, the manifest before the first chunk."""
    resource = tensor_pb2.Resource()
    resource.CopyFrom(RESOURCE)
    resource.MergeFrom(tensor_pb2.Resource(**changes))
    with pytest.raises(WorkFailed, match=words):
        await BundleCache(link_to(Scripted([])), 1024, lambda count: None).get([resource])


async def test_received_bytes_are_counted():
    """Three chunks of 64, 64 and 128 bytes."""
    counts = []
    await BundleCache(link_to(Scripted([(0, 64), (64, 64), (128, 128)])), 1 << 20, counts.append).get([RESOURCE])
    assert counts == [64, 64, 128]
