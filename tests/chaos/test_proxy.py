"""The proxy between a real gRPC client and a real gRPC server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from protos.chunks import ChunkError, check_chunk, encode_chunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.wire import client_options
from tests.chaos.grpc_bytes import PREFIX, Piece, Position
from tests.chaos.proxy import Proxy
from tests.chaos.traps import Action, Damage, Where

SIZE, COUNT = 40_000, 3
CHUNKS = [bytes([number]) * SIZE for number in range(COUNT)]
WHOLE = [SIZE + PREFIX] * COUNT
WHERES: tuple[Where, ...] = ("before", "inside", "behind")
POINTS = [(number, where) for number in range(1, COUNT + 1) for where in WHERES]


class Peer(grpc.GenericRpcHandler):
    """Receives streams of bytes and sends one."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if details.method == "/up":
            return grpc.stream_unary_rpc_method_handler(self.up)
        return grpc.unary_stream_rpc_method_handler(self.down)

    def up(self, messages: Iterator[bytes], context: Any) -> bytes:
        self.calls.append(came := [])
        for message in messages:
            came.append(message)  # noqa: PERF402 - keeps the chunks before an error
        return b"thanks"

    def down(self, request: Any, context: Any) -> Iterator[bytes]:
        yield from CHUNKS


@pytest.fixture
def peer() -> Peer:
    """The handler of the server, with everything it received."""
    return Peer()


@pytest.fixture
def proxy(peer: Peer) -> Iterator[Proxy]:
    """A proxy between the test and a server."""
    server = grpc.server(futures.ThreadPoolExecutor(4), [peer], options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Proxy(f"127.0.0.1:{port}") as proxy:
        yield proxy
    server.stop(None).wait()


def upload(proxy: Proxy) -> bytes:
    """Send the chunks on a new connection; returns the answer."""
    with grpc.insecure_channel(proxy.address, list(client_options())) as channel:
        send: Any = channel.stream_unary("/up")
        return bytes(send(iter(CHUNKS), timeout=60))


def download(proxy: Proxy) -> tuple[list[bytes], bool]:
    """The chunks received on a new connection, and whether the stream completed."""
    came: list[bytes] = []
    with grpc.insecure_channel(proxy.address, list(client_options())) as channel:
        try:
            receive: Any = channel.unary_stream("/down")
            for chunk in receive(b"", timeout=60):
                came.append(chunk)  # noqa: PERF402 - keeps the chunks before an error
        except grpc.RpcError:
            return came, False
    return came, True


def read_all(connection: Any) -> None:
    """Read until the connection ends."""
    while connection.recv(1000):
        pass


def test_bytes_pass_unchanged(proxy: Proxy, peer: Peer) -> None:
    """Without a trap everything arrives and is counted."""
    assert upload(proxy) == b"thanks"
    assert peer.calls[0] == CHUNKS
    assert download(proxy) == (CHUNKS, True)
    assert (proxy.chunks("up"), proxy.chunks("down")) == (WHOLE, WHOLE)
    assert (proxy.cuts, proxy.corrupted, proxy.held, proxy.absences) == (0, 0, 0, 0)


@pytest.mark.parametrize("action", ["reset", "end"])
@pytest.mark.parametrize(("number", "where"), POINTS)
def test_an_upload_is_cut_at_the_chosen_point(
    proxy: Proxy, peer: Peer, number: int, where: Where, action: Action
) -> None:
    """A cut before or inside message n lets n - 1 messages pass, a cut behind it n. The next connection passes."""
    trap = proxy.cut("up", number, where, action)
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        upload(proxy)
    passed = number if where == "behind" else number - 1
    assert trap.triggered.is_set()
    assert (proxy.cuts, proxy.chunks("up")) == (1, WHOLE[:passed])
    assert upload(proxy) == b"thanks"
    arrived = [came for came in peer.calls if came != CHUNKS]
    assert [CHUNKS[: len(came)] for came in arrived] == arrived
    assert all(len(came) <= passed for came in arrived)


@pytest.mark.parametrize(("number", "where"), POINTS)
def test_a_download_is_cut_at_the_chosen_point(proxy: Proxy, number: int, where: Where) -> None:
    """The same for a download; never more than the passed messages arrive."""
    proxy.cut("down", number, where, "end")
    came, whole = download(proxy)
    passed = number if where == "behind" else number - 1
    assert not whole
    assert (proxy.cuts, proxy.chunks("down")) == (1, WHOLE[:passed])
    assert came == CHUNKS[: len(came)]
    assert len(came) <= passed
    assert download(proxy) == (CHUNKS, True)


def test_a_trap_behind_the_last_message_waits_for_a_longer_stream(proxy: Proxy) -> None:
    """A trap that was not triggered is not counted."""
    trap = proxy.cut("down", COUNT + 1)
    assert download(proxy) == (CHUNKS, True)
    assert (trap.triggered.is_set(), proxy.cuts) == (False, 0)


def test_one_bit_of_one_message_is_flipped_once(proxy: Proxy, peer: Peer) -> None:
    """The n-th message differs in one bit. The others and the next stream do not."""
    proxy.corrupt("up", 2)
    upload(proxy)
    flipped = int.from_bytes(peer.calls[0][1]) ^ int.from_bytes(CHUNKS[1])
    assert (peer.calls[0][0], peer.calls[0][2], flipped.bit_count()) == (CHUNKS[0], CHUNKS[2], 1)
    assert proxy.corrupted == 1
    assert download(proxy) == (CHUNKS, True)


def test_held_bytes_arrive_after_the_release(proxy: Proxy, peer: Peer) -> None:
    """The same stream continues, and nothing is lost."""
    trap = proxy.cut("up", 2, "inside", "hold")
    with futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(upload, proxy)
        assert trap.triggered.wait(60)
        assert not answer.done()
        assert (proxy.chunks("up"), proxy.held, proxy.cuts) == (WHOLE[:1], 1, 0)
        proxy.pass_on()
        assert answer.result(60) == b"thanks"
    assert peer.calls[0] == CHUNKS


def test_connections_are_refused_while_the_proxy_is_away(proxy: Proxy) -> None:
    """Connections are reset and refused. Afterwards the same port answers again."""
    host, _, port = proxy.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as open_one:
        proxy.away()
        with pytest.raises(ConnectionResetError):
            read_all(open_one)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=60)
    proxy.back()
    assert download(proxy) == (CHUNKS, True)
    assert proxy.absences == 1


def test_a_missing_target_ends_the_connection(proxy: Proxy) -> None:
    """The connection is refused, and the proxy continues."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Proxy(unused.getsockname) as lonely:
            assert download(lonely) == ([], False)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_damage_is_found_by_the_checksum_unless_it_is_sealed(sealed: bool, piece: int) -> None:
    """With a corrected checksum check_chunk accepts the chunk although one bit of its data differs."""
    data = bytes(index * 7 % 251 for index in range(20_000))
    message = bytes(PREFIX) + encode_chunk(data, 300, 19_000)
    damage, came = Damage("up", 1, sealed), b""
    for start, end in [(0, PREFIX), *((at, min(at + piece, len(message))) for at in range(5, len(message), piece))]:
        came += damage.damaged(Piece(message[start:end]), Position(1, 1, start, end, len(message)))
    chunk = pb.SubmitUpdateRequest.FromString(came[PREFIX:]).chunk
    assert damage.done
    assert (int.from_bytes(chunk.data) ^ int.from_bytes(data[300:19_300])).bit_count() == 1
    if sealed:
        check_chunk(chunk, 300, 1 << 20, len(data))
    else:
        with pytest.raises(ChunkError, match="crc32c"):
            check_chunk(chunk, 300, 1 << 20, len(data))
