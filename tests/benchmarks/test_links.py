"""The proxy of the benchmark of links passes bytes, ends and resets on, and its links count bytes at their rate."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import struct
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from benchmarks.links.__main__ import _parser, run_toml, transfers
from benchmarks.links.link import Link, TokenBucket
from benchmarks.links.proxy import forward, listen, proxy

FAST = Link(down=1e9, up=1e9, round_trip_s=0.002)
SIZE = 3 << 20


def test_bytes_leave_at_the_rate() -> None:
    """At 100 bytes a second, 50 bytes need half a second, and the next ones leave behind them."""
    bucket = TokenBucket(rate=100)
    assert [bucket.departure(50, now=10.0), bucket.departure(100, now=10.2)] == [10.5, 11.5]


def test_an_idle_link_saves_up_no_more_than_its_burst() -> None:
    """After a long pause 20 bytes leave at once; the 50 bytes behind them need half a second."""
    bucket = TokenBucket(rate=100, burst_bytes=20)
    bucket.departure(100, now=0.0)
    assert [bucket.departure(20, now=60.0), bucket.departure(50, now=60.0)] == [60.0, 60.5]


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10Mbit/s,20ms", Link(1.25e6, 1.25e6, 0.02)),
        ("50MB/s/500kB/s,0.5ms", Link(50e6, 5e5, 0.0005)),
    ],
)
def test_a_link_in_words(text: str, link: Link) -> None:
    """One rate for both directions, or down and up."""
    assert Link.parse(text) == link


@pytest.mark.parametrize("text", ["", "50MB/s", "50,200ms", "50MB/s,200", "5MB/s5MB/s,1ms", "0MB/s,1ms", "1MB/s/,1ms"])
def test_an_invalid_link_is_refused(text: str) -> None:
    """The error has the text."""
    with pytest.raises(ValueError, match="expected a "):
        Link.parse(text)


@asynccontextmanager
async def through(link: Link) -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection through the proxy, which runs on this loop."""
    loop = asyncio.get_running_loop()
    with listen() as listener, listen() as target, socket.socket() as near:
        forwarding = asyncio.create_task(forward(listener, target.getsockname(), link))
        near.setblocking(False)
        await loop.sock_connect(near, listener.getsockname())
        far, _ = await loop.sock_accept(target)
        with far:
            yield near, far
        forwarding.cancel()
        await asyncio.gather(forwarding, return_exceptions=True)


async def received(end: socket.socket) -> bytes:
    """All bytes up to the end of the direction."""
    pieces = []
    while piece := await asyncio.get_running_loop().sock_recv(end, 1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


async def test_bytes_and_half_closes_pass() -> None:
    """The far end answers only after the near end's half-close, over a queue far smaller than the bytes."""
    loop, sent = asyncio.get_running_loop(), os.urandom(SIZE)
    async with through(FAST) as (near, far):
        reading = asyncio.create_task(received(far))
        await loop.sock_sendall(near, sent)
        near.shutdown(socket.SHUT_WR)
        assert await reading == sent
        answer = sent[::-1]
        reading = asyncio.create_task(received(near))
        await loop.sock_sendall(far, answer)
        far.shutdown(socket.SHUT_WR)
        assert await reading == answer


@pytest.mark.parametrize("which", [0, 1], ids=["near", "far"])
async def test_a_reset_passes(which: int) -> None:
    """The other end gets it as a reset, not as an orderly end."""
    async with through(FAST) as ends:
        ends[which].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ends[which].close()
        with pytest.raises(ConnectionResetError):
            await received(ends[1 - which])


async def test_a_full_queue_stops_the_sender() -> None:
    """A link that carries nothing holds its queue and what the kernel buffers, and takes no more."""
    stalled = Link(down=1.0, up=1.0, round_trip_s=0.0, buffer_bytes=1 << 16)
    async with through(stalled) as (near, _):
        sending = asyncio.create_task(send_pieces(near))
        done, _ = await asyncio.wait([sending], timeout=1.0)
        sending.cancel()
        assert not done


async def send_pieces(end: socket.socket) -> None:
    """Send 32 MiB."""
    for _ in range(512):
        await asyncio.get_running_loop().sock_sendall(end, bytes(1 << 16))


@pytest.fixture
def echo() -> Iterator[socket.socket]:
    """A listening socket."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener


def test_the_proxy_serves_from_a_process_of_its_own(echo: socket.socket) -> None:
    """Its address accepts connections, and forwards them to the given one."""
    host, port = echo.getsockname()
    with proxy(f"{host}:{port}", FAST) as address:
        name, _, number = address.rpartition(":")
        with socket.create_connection((name, int(number))) as near:
            near.sendall(b"ping")
            far, _ = echo.accept()
            with far:
                assert far.recv(4) == b"ping"
        with socket.socket() as late:
            assert late.connect_ex((name, int(number))) == 0
    with socket.socket() as late:
        assert late.connect_ex((name, int(number))) != 0


@pytest.mark.parametrize(
    ("options", "encodings"),
    [
        ([], None),
        (["--encoding", "update=int8", "model=bf16"], {"update": "int8", "model": "bf16"}),
        (["--encoding", "difference=previous"], {"difference": "previous"}),
    ],
    ids=["none", "two", "difference"],
)
def test_encodings_are_in_the_run_only_if_given(options: list[str], encodings: dict[str, str] | None) -> None:
    """A coordinator without encodings would refuse the section."""
    assert tomllib.loads(run_toml(_parser().parse_args(options))).get("encodings") == encodings


def test_an_encoding_of_no_bundle_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the keys."""
    with pytest.raises(SystemExit):
        _parser().parse_args(["--encoding", "gradient=int8"])
    assert "a key of update, model, direction, difference, got 'gradient=int8'" in capsys.readouterr().err


def test_transfers_are_measured_from_a_daemons_log() -> None:
    """Two seconds to the trained update, of which half a second was training, and three more to the receipt."""
    log: list[dict[str, Any]] = [
        {"event": "registered", "timestamp": "2026-11-23T10:00:00Z"},
        {"event": "assignment", "timestamp": "2026-11-23T10:00:01Z"},
        {"event": "trained", "timestamp": "2026-11-23T10:00:03Z", "seconds": 0.5},
        {"event": "submitted", "timestamp": "2026-11-23T10:00:06Z"},
    ]
    assert transfers(log) == [(1.5, 3.0)]
    with pytest.raises(SystemExit, match="expected assignment, trained, submitted"):
        transfers(log[:2] + log[3:])


def test_the_command_needs_no_options() -> None:
    """The defaults are valid links."""
    case: argparse.Namespace = _parser().parse_args([])
    assert [Link.parse(each).round_trip_s for each in case.links] == [0.02, 0.05, 0.2]
