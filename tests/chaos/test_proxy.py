"""The proxy does what it says, between a real gRPC client and a real gRPC server."""

from __future__ import annotations

import socket
from concurrent import futures

import grpc
import pytest

from protos.chunks import ChunkError, check_chunk, encode_chunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.wire import client_options
from tests.chaos.grpc_bytes import PREFIX, Piece, Place
from tests.chaos.proxy import Proxy
from tests.chaos.traps import Damage

SIZE, COUNT = 40_000, 3
CHUNKS = [bytes([number]) * SIZE for number in range(COUNT)]
WHOLE = [SIZE + PREFIX] * COUNT
POINTS = [(number, where) for number in range(1, COUNT + 1) for where in ("before", "inside", "behind")]


class Peer(grpc.GenericRpcHandler):
    """Takes streams of bytes, and sends one."""

    def __init__(self):
        self.calls = []

    def service(self, details):
        one = {"/up": grpc.stream_unary_rpc_method_handler(self.up)}
        return one.get(details.method) or grpc.unary_stream_rpc_method_handler(self.down)

    def up(self, messages, context):
        self.calls.append(came := [])
        for message in messages:
            came.append(message)  # noqa: PERF402 - also when the stream breaks
        return b"thanks"

    def down(self, request, context):
        yield from CHUNKS


@pytest.fixture
def peer():
    """What the server of this test was sent."""
    return Peer()


@pytest.fixture
def proxy(peer):
    """A proxy before a server."""
    server = grpc.server(futures.ThreadPoolExecutor(4), [peer], options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Proxy(f"127.0.0.1:{port}") as proxy:
        yield proxy
    server.stop(None).wait()


def upload(proxy):
    """Send the chunks on a connection of their own; the answer."""
    with grpc.insecure_channel(proxy.address, list(client_options())) as channel:
        return channel.stream_unary("/up")(iter(CHUNKS), timeout=60)


def download(proxy):
    """The chunks that come on a connection of their own, and whether all did."""
    came = []
    with grpc.insecure_channel(proxy.address, list(client_options())) as channel:
        try:
            for chunk in channel.unary_stream("/down")(b"", timeout=60):
                came.append(chunk)  # noqa: PERF402 - those before an error count
        except grpc.RpcError:
            return came, False
    return came, True


def read_all(connection):
    """What the server says before the end."""
    while connection.recv(1000):
        pass


def test_it_passes_on(proxy, peer):
    """Without a trap everything arrives, and is counted."""
    assert upload(proxy) == b"thanks"
    assert peer.calls[0] == CHUNKS
    assert download(proxy) == (CHUNKS, True)
    assert (proxy.chunks("up"), proxy.chunks("down")) == (WHOLE, WHOLE)
    assert (proxy.cuts, proxy.corrupted, proxy.held, proxy.absences) == (0, 0, 0, 0)


@pytest.mark.parametrize("action", ["reset", "end"])
@pytest.mark.parametrize(("number", "where"), POINTS)
def test_an_upload_is_cut_where_it_was_said(proxy, peer, number, where, action):
    """Before and inside the n-th message n - 1 pass, behind it n; the next connection passes on."""
    trap = proxy.cut("up", number, where, action)
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        upload(proxy)
    passed = number if where == "behind" else number - 1
    assert trap.snapped.is_set()
    assert (proxy.cuts, proxy.chunks("up")) == (1, WHOLE[:passed])
    assert upload(proxy) == b"thanks"
    arrived = [came for came in peer.calls if came != CHUNKS]
    assert [CHUNKS[: len(came)] for came in arrived] == arrived
    assert all(len(came) <= passed for came in arrived)


@pytest.mark.parametrize(("number", "where"), POINTS)
def test_a_download_is_cut_where_it_was_said(proxy, number, where):
    """Likewise; what the trap let pass arrives before the connection ends, never more."""
    proxy.cut("down", number, where, "end")
    came, whole = download(proxy)
    passed = number if where == "behind" else number - 1
    assert not whole
    assert (proxy.cuts, proxy.chunks("down")) == (1, WHOLE[:passed])
    assert came == CHUNKS[: len(came)]
    assert len(came) <= passed
    assert download(proxy) == (CHUNKS, True)


def test_a_trap_behind_the_last_message_waits_for_a_longer_stream(proxy):
    """What did not happen is not counted."""
    trap = proxy.cut("down", COUNT + 1)
    assert download(proxy) == (CHUNKS, True)
    assert (trap.snapped.is_set(), proxy.cuts) == (False, 0)


def test_one_bit_of_one_message_is_flipped_once(proxy, peer):
    """The n-th message differs in one bit, the others and the next stream's do not."""
    proxy.corrupt("up", 2)
    upload(proxy)
    flipped = int.from_bytes(peer.calls[0][1]) ^ int.from_bytes(CHUNKS[1])
    assert (peer.calls[0][0], peer.calls[0][2], flipped.bit_count()) == (CHUNKS[0], CHUNKS[2], 1)
    assert proxy.corrupted == 1
    assert download(proxy) == (CHUNKS, True)


def test_what_is_held_comes_when_it_passes_on(proxy, peer):
    """Nothing is lost: the same stream goes on from where it was."""
    trap = proxy.cut("up", 2, "inside", "hold")
    with futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(upload, proxy)
        assert trap.snapped.wait(60)
        assert not answer.done()
        assert (proxy.chunks("up"), proxy.held, proxy.cuts) == (WHOLE[:1], 1, 0)
        proxy.pass_on()
        assert answer.result(60) == b"thanks"
    assert peer.calls[0] == CHUNKS


def test_nobody_listens_while_it_is_away(proxy):
    """Connections are reset and refused; then the same port answers again."""
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


def test_a_target_that_is_not_there_ends_the_connection(proxy):
    """As if nobody listened, and the proxy goes on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Proxy(unused.getsockname) as lonely:
            assert download(lonely) == ([], False)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_damage_is_found_by_the_checksum_unless_it_is_sealed(sealed, piece):
    """With a checksum made to fit, check_chunk takes the chunk, and one bit of its data is another."""
    data = bytes(index * 7 % 251 for index in range(20_000))
    message = bytes(PREFIX) + encode_chunk(data, 300, 19_000)
    damage, came = Damage("up", 1, sealed), b""
    for start, end in [(0, PREFIX), *((at, min(at + piece, len(message))) for at in range(5, len(message), piece))]:
        came += damage.damaged(Piece(message[start:end]), Place(1, 1, start, end, len(message)))
    chunk = pb.SubmitUpdateRequest.FromString(came[PREFIX:]).chunk
    assert damage.done
    assert (int.from_bytes(chunk.data) ^ int.from_bytes(data[300:19_300])).bit_count() == 1
    if sealed:
        check_chunk(chunk, 300, 1 << 20, len(data))
    else:
        with pytest.raises(ChunkError, match="crc32c"):
            check_chunk(chunk, 300, 1 << 20, len(data))
