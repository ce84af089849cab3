"""Downloads of bundles, chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import pytest
import torch

from fl_client.connection.bundles import download
from fl_client.connection.bundles.cache import BundleCache
from fl_client.connection.bundles.download import MAX_STALLS, Download
from fl_client.connection.bundles.expected import Bundle, ExpectedBundle, ResourceKey
from fl_client.connection.link import Backoff, Link, RetryDelays, Session
from fl_client.connection.transport import Fetched, GrpcTransport
from fl_client.errors import BrokenTransfer, WorkFailed
from protos import codec
from protos.chunks import make_chunk, read_chunk
from protos.encodings import PLAIN, EncodedLayout, EncodingSpec, decode, encode
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2

LAYOUT = codec.Layout.of({"w": torch.arange(64.0)})
DATA = bytes(codec.pack({"w": torch.arange(64.0)}, LAYOUT))  # 256 bytes
RESOURCE = tensor_pb2.Resource(
    kind=tensor_pb2.RESOURCE_KIND_MODEL, digest=codec.digest_message(LAYOUT.digest(DATA)), size_bytes=len(DATA)
)


EXPECTED = {tensor_pb2.RESOURCE_KIND_MODEL: LAYOUT}
"""The layout of this device's model."""


class Scripted(GrpcTransport):
    """A connection with scripted fetches: each yields the next list of spans."""

    manifest = LAYOUT.to_manifest()
    data = DATA

    def __init__(
        self,
        *spans: list[tuple[int, int]],
        form: Callable[[pb.FetchModelResponse], Fetched] = lambda message: message,
    ) -> None:
        self.spans = list(spans)
        self.offsets: list[int] = []
        self.form = form

    async def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
        """The next list of (offset, length)."""
        self.offsets.append(request.offset)
        yield pb.FetchModelResponse(header=pb.ResourceHeader(resource=RESOURCE, manifest=self.manifest))
        for offset, length in self.spans.pop(0):
            yield self.form(pb.FetchModelResponse(chunk=make_chunk(self.data, offset, length)))


def _read_in_place(message: pb.FetchModelResponse) -> Fetched:
    chunk = read_chunk(message.SerializeToString())
    assert chunk is not None
    return chunk


def expected(layout: codec.Layout) -> ExpectedBundle:
    """The resource, with this layout in this device's model."""
    return ExpectedBundle(RESOURCE, EncodedLayout.of(layout, PLAIN))


def link_to(connection: Scripted) -> Link:
    """A link with an open session."""
    link = Link(RetryDelays(first=0.001, longest=0.002))
    link.open(Session("s", connection, 64, 128))
    return link


def bytes_of(held: Mapping[ResourceKey, Bundle]) -> bytes:
    """The bytes of the model."""
    model = held[tensor_pb2.RESOURCE_KIND_MODEL]
    return bytes(codec.pack(model.tensors, model.layout))


async def test_a_fetch_continues_with_chunks_of_another_size() -> None:
    """After 100 bytes the chunks become 64 bytes. The coordinator continues at its border, 64."""
    connection = Scripted([(0, 100)], [(64, 64), (128, 128)])
    cache = BundleCache(link_to(connection), 1 << 20, lambda count: None)
    held = await cache.get([RESOURCE], EXPECTED)
    assert connection.offsets == [0, 100]
    assert bytes_of(held) == DATA


async def test_chunks_that_are_read_where_they_lie_are_the_same() -> None:
    """Chunks have this form when they are received."""
    connection = Scripted([(0, 100), (100, 128), (228, 28)], form=_read_in_place)
    held = await BundleCache(link_to(connection), 1 << 20, lambda count: None).get([RESOURCE], EXPECTED)
    assert bytes_of(held) == DATA


async def test_two_concurrent_requests_fetch_once() -> None:
    """Training and evaluation request the same model at the same time."""
    connection = Scripted([(0, 128), (128, 128)])
    cache = BundleCache(link_to(connection), 1 << 20, lambda count: None)
    first, second = await asyncio.gather(cache.get([RESOURCE], EXPECTED), cache.get([RESOURCE], EXPECTED))
    assert connection.offsets == [0]
    assert cache.held() == [RESOURCE.digest]
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
async def test_a_stream_out_of_order_is_an_error(spans: list[tuple[int, int]], words: str) -> None:
    """A gap, a step back, a chunk over the limit and an early end each have their error."""
    download = Download(
        expected(LAYOUT),
        memoryview(bytearray(RESOURCE.size_bytes)),
        Backoff(RetryDelays()),
        lambda count: None,
    )
    with pytest.raises(BrokenTransfer, match=words):
        await download.resume(Session("s", Scripted(spans), 64, 128))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size_bytes": 2 << 20}, "at most 1048576 bytes"),
        ({"encoding": 2}, "expected an encoding of plain .* got number 2"),
        ({"digest": tensor_pb2.Digest(value=b"short")}, "digest of 32 bytes, got 5"),
        ({"size_bytes": 700 << 20}, "at most 1048576 bytes"),
        ({"size_bytes": 70 << 10}, "RESOURCE_KIND_MODEL: expected 256 bytes for the model here, got 71680"),
        ({"kind": tensor_pb2.RESOURCE_KIND_FROZEN}, "this model has none"),
        ({"kind": 17}, "this model has none"),
    ],
)
async def test_an_unusable_resource_is_refused(changes: dict[str, Any], words: str) -> None:
    """Kind, size, encoding and digest are checked before any fetch; Scripted([]) would fail."""
    resource = tensor_pb2.Resource()
    resource.CopyFrom(RESOURCE)
    resource.MergeFrom(tensor_pb2.Resource(**changes))
    with pytest.raises(WorkFailed, match=words):
        await BundleCache(link_to(Scripted([])), 1 << 20, lambda count: None).get([resource], EXPECTED)


async def test_received_bytes_are_counted() -> None:
    """Three chunks of 64, 64 and 128 bytes."""
    counts: list[int] = []
    await BundleCache(link_to(Scripted([(0, 64), (64, 64), (128, 128)])), 1 << 20, counts.append).get(
        [RESOURCE], EXPECTED
    )
    assert counts == [64, 64, 128]


@pytest.mark.parametrize(
    "other", [{"v": torch.arange(64.0)}, {"w": torch.arange(64.0).view(8, 8)}, {"w": torch.arange(80.0)}]
)
async def test_a_table_of_contents_of_another_model_ends_the_fetch(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, torch.Tensor]
) -> None:
    """With another name, shape or size: no chunk is taken, and the error names the first tensor that differs."""
    monkeypatch.setattr(Scripted, "manifest", codec.Layout.of(other).to_manifest())
    counts: list[int] = []
    cache = BundleCache(link_to(Scripted([(0, 128), (128, 128)])), 1 << 20, counts.append)
    with pytest.raises(WorkFailed, match="RESOURCE_KIND_MODEL, the model here against the coordinator's"):
        await cache.get([RESOURCE], EXPECTED)
    assert counts == []


async def test_a_model_and_a_direction_of_the_same_bytes_are_two_bundles() -> None:
    """Each is fetched, because bundles are stored by kind too."""
    direction = tensor_pb2.Resource()
    direction.CopyFrom(RESOURCE)
    direction.kind = tensor_pb2.RESOURCE_KIND_DIRECTION
    connection = Scripted([(0, 128), (128, 128)], [(0, 128), (128, 128)])
    expected = {**EXPECTED, tensor_pb2.RESOURCE_KIND_DIRECTION: LAYOUT}
    held = await BundleCache(link_to(connection), 1 << 20, lambda count: None).get([RESOURCE, direction], expected)
    assert held.keys() == expected.keys()
    assert connection.offsets == [0, 0]


async def test_a_second_header_breaks_a_stream() -> None:
    """Otherwise a coordinator that sends only headers would keep the daemon waiting without end."""
    download = Download(expected(LAYOUT), memoryview(bytearray(256)), Backoff(RetryDelays()), lambda count: None)

    class Headers(Scripted):
        async def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
            while True:
                yield pb.FetchModelResponse(header=pb.ResourceHeader(manifest=LAYOUT.to_manifest()))

    with pytest.raises(BrokenTransfer, match="expected one header"):
        await download.resume(Session("s", Headers(), 64, 128))


async def test_empty_streams_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon gives up after a few in a row. A stream with data restarts the count."""
    monkeypatch.setattr(download, "STALL_S", 0.01)

    class Silent(Scripted):
        async def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
            self.offsets.append(request.offset)
            if len(self.offsets) == MAX_STALLS:
                yield pb.FetchModelResponse(header=pb.ResourceHeader(manifest=LAYOUT.to_manifest()))
                yield pb.FetchModelResponse(chunk=make_chunk(DATA, 0, 64))
            await asyncio.Event().wait()

    connection = Silent()
    with pytest.raises(WorkFailed, match="in a row stalled"):
        await BundleCache(link_to(connection), 1 << 20, lambda count: None).get([RESOURCE], EXPECTED)
    assert connection.offsets == [0, 0, 0, 64, 64]


async def test_a_step_far_back_is_refused() -> None:
    """A coordinator continues at the chunk border below. From further back it could send the same without end."""
    size = 8 << 20
    layout = codec.Layout.of({"w": torch.zeros(size // 4)})
    download = Download(expected(layout), memoryview(bytearray(size)), Backoff(RetryDelays()), lambda count: None)
    spans = [[(at, 4 << 20) for at in (0, 4 << 20)][:1], [(0, 64)]]

    class Rewinding(Scripted):
        async def fetch(self, request: pb.FetchModelRequest, header_bytes: int) -> AsyncGenerator[Fetched, None]:
            for offset, length in self.spans.pop(0):
                yield pb.FetchModelResponse(chunk=make_chunk(bytes(size), offset, length))

    session = Session("s", Rewinding(*spans), 4 << 20, 4 << 20)
    with pytest.raises(BrokenTransfer, match="ended at byte 4194304"):
        await download.resume(session)
    with pytest.raises(BrokenTransfer, match="expected a chunk at offset 4194304, got offset 0"):
        await download.resume(session)


VALUES = {"w": torch.linspace(-1, 1, 64) ** 3}
KEY = bytes(range(16))
TRAINED = {tensor_pb2.RESOURCE_KIND_MODEL: codec.Layout.of(VALUES, VALUES)}


def encoded_connection(name: str) -> tuple[Scripted, tensor_pb2.Resource]:
    """A connection that sends the model in an encoding, and the resource."""
    layout = EncodedLayout.of(TRAINED[tensor_pb2.RESOURCE_KIND_MODEL], EncodingSpec(name))
    data = bytes(encode(VALUES, layout, KEY))
    resource = tensor_pb2.Resource(
        kind=tensor_pb2.RESOURCE_KIND_MODEL,
        digest=codec.digest_message(layout.digest(data)),
        size_bytes=len(data),
        encoding=layout.spec.wire,
        encoding_key=KEY,
    )
    connection = Scripted([(0, len(data))])
    connection.manifest, connection.data = layout.to_manifest(), data
    return connection, resource


@pytest.mark.parametrize("name", ["bf16", "int8", "eden4"])
async def test_an_encoded_bundle_is_decoded_once(name: str) -> None:
    """With the key of its resource, after a resumed fetch; it is held by the digest of the encoded bytes."""
    connection, resource = encoded_connection(name)
    connection.spans = [[(0, 20)], [(20, len(connection.data) - 20)]]
    cache = BundleCache(link_to(connection), 1 << 20, lambda count: None)
    first = (await cache.get([resource], TRAINED))[tensor_pb2.RESOURCE_KIND_MODEL]
    layout = EncodedLayout.of(first.layout, EncodingSpec(name))
    expected = decode(connection.data, layout, KEY)["w"]
    assert torch.equal(first.tensors["w"], expected)
    assert 0 < float((expected - VALUES["w"]).abs().max()) < 0.2
    assert (await cache.get([resource], TRAINED))[tensor_pb2.RESOURCE_KIND_MODEL] is first
    assert connection.offsets == [0, 20]


async def test_another_key_is_another_bundle() -> None:
    """Equal bytes mean other values with another key."""
    connection, resource = encoded_connection("eden4")
    connection.spans *= 2
    cache = BundleCache(link_to(connection), 1 << 20, lambda count: None)
    first = await cache.get([resource], TRAINED)
    resource.encoding_key = bytes(16)
    second = await cache.get([resource], TRAINED)
    assert connection.offsets == [0, 0]
    assert bytes_of(first) != bytes_of(second)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoding_key": b"short"}, "encoding_key of 16 bytes, or none with PLAIN, got 5"),
        ({"encoding": tensor_pb2.ENCODING_TOP_K}, "expected a fraction over 0 .* for topk"),
        ({"size_bytes": 70 << 10}, "expected 68 bytes for the model here"),
    ],
)
async def test_an_unusable_encoded_resource_is_refused(changes: dict[str, Any], words: str) -> None:
    """Before any fetch."""
    connection, resource = encoded_connection("int8")
    resource.MergeFrom(tensor_pb2.Resource(**changes))
    with pytest.raises(WorkFailed, match=words):
        await BundleCache(link_to(connection), 1 << 20, lambda count: None).get([resource], TRAINED)
    assert connection.offsets == []


async def test_a_manifest_of_another_encoding_ends_the_fetch() -> None:
    """Than that of the assignment."""
    connection, resource = encoded_connection("int8")
    connection.manifest.encoding = tensor_pb2.ENCODING_INT4
    with pytest.raises(WorkFailed, match="expected encoding int8 .* got number 7"):
        await BundleCache(link_to(connection), 1 << 20, lambda count: None).get([resource], TRAINED)


async def test_bytes_that_the_encoding_does_not_have_are_refused() -> None:
    """Their digest is right: the coordinator made them."""
    connection, resource = encoded_connection("int8")
    data = bytearray(connection.data)
    data[:4] = torch.tensor([-1.0]).numpy().tobytes()
    layout = EncodedLayout.of(TRAINED[tensor_pb2.RESOURCE_KIND_MODEL], EncodingSpec("int8"))
    connection.data = bytes(data)
    resource.digest.CopyFrom(codec.digest_message(layout.digest(data)))
    with pytest.raises(WorkFailed, match="RESOURCE_KIND_MODEL: tensor 'w': expected scales"):
        await BundleCache(link_to(connection), 1 << 20, lambda count: None).get([resource], TRAINED)


async def test_a_manifest_is_compared_with_the_model_of_its_own_assignment() -> None:
    """The layout of the assignment before is remembered. A resource for another model, of the same size, is refused."""
    cache = BundleCache(link_to(Scripted([(0, 128), (128, 128)], [])), 1 << 20, lambda count: None)
    await cache.get([RESOURCE], EXPECTED)
    other = codec.Layout.of({"v": torch.arange(64.0)})
    again = tensor_pb2.Resource(kind=RESOURCE.kind, digest=codec.digest_message(other.digest(DATA)), size_bytes=256)
    with pytest.raises(WorkFailed, match="'v'"):
        await cache.get([again], {tensor_pb2.RESOURCE_KIND_MODEL: other})
