"""HTTP/2 without a library: calls as bytes, so that every frame and every header may be wrong.

Headers are sent as literals without compression (RFC 7541, 6.2.2), which every server reads.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from fl_ops.admin.settings import Certificates
from tests.fuzz.wire import damaged

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
_STATUS = re.compile(rb"grpc-status.(\d{1,2})", re.DOTALL)
"""grpc writes its first trailers on a connection as literals."""
INTERNAL, UNKNOWN = 13, 2

Headers = Sequence[tuple[bytes, bytes]]


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(headers: Headers) -> bytes:
    """A block of headers; names and values are at most 126 bytes long."""
    return b"".join(b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in headers)


def message(raw: bytes, compressed: int = 0) -> bytes:
    """A message with its prefix of five bytes."""
    return bytes([compressed]) + struct.pack(">I", len(raw)) + raw


@dataclass(slots=True)
class RawCall:
    """A call in parts, each of which a test may change."""

    path: bytes
    body: bytes
    """Messages with their prefixes."""
    content_type: bytes = b"application/grpc"
    method: bytes = b"POST"
    extra: list[tuple[bytes, bytes]] = field(default_factory=list)
    more_frames: list[bytes] = field(default_factory=list)
    """Frames before the body."""

    def frames(self) -> list[bytes]:
        """The whole connection."""
        headers = [
            (b":method", self.method), (b":scheme", b"http"), (b":path", self.path), (b":authority", b"127.0.0.1"),
            (b"content-type", self.content_type), (b"te", b"trailers"), *self.extra,
        ]  # fmt: skip
        return [
            PREFACE, frame(SETTINGS), frame(HEADERS, literal(headers), END_HEADERS, 1), *self.more_frames,
            frame(DATA, self.body, END_STREAM, 1),
        ]  # fmt: skip


def exchange(address: str, sent: bytes, certificates: Certificates | None, wait_s: float = 5.0) -> int | None:
    """Send bytes on a new connection; returns the call's grpc-status, None if the connection ended without one."""
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), wait_s)
    with plain if certificates is None else _secured(plain, certificates) as channel:
        received = b""
        try:
            channel.sendall(sent)
            ends = time.monotonic() + wait_s
            while time.monotonic() < ends:
                channel.settimeout(max(0.01, ends - time.monotonic()))
                if not (data := channel.recv(65_536)):
                    break
                received += data
                if (found := _STATUS.search(received)) is not None:
                    return int(found[1])
                if b"\x00\x00\x00\x04\x00" in received[:64] and _is_over(received):
                    break
        except OSError:
            return None
    return None


def _is_over(received: bytes) -> bool:
    """Whether a frame ends the connection or the stream."""
    at = 0
    while at + 9 <= len(received):
        length, kind = int.from_bytes(received[at : at + 3], "big"), received[at + 3]
        if kind in {RESET, GOAWAY}:
            return True
        at += 9 + length
    return False


def _secured(plain: socket.socket, certificates: Certificates) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(certificates.ca))
    context.load_cert_chain(certificates.cert, certificates.key)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"deflate"), (b"grpc-encoding", b"x"), (b"grpc-timeout", b"1n"),
    (b"grpc-timeout", b"99999999H"), (b"grpc-timeout", b"-1S"), (b"grpc-timeout", b"x"), (b"grpc-trace-bin", b"!"),
    (b"x-bin", b"===="), (b"x", b"\x00\r\n"), (b"X", b"upper"), (b":late", b"1"), (b"content-length", b"-1"),
    (b"connection", b"close"), (b"grpc-status", b"0"), (b"traceparent", b"00-" + b"z" * 52), (b"", b""),
    (b"grpc-accept-encoding", b"gzip"), (b"grpc-previous-rpc-attempts", b"x"), (b"user-agent", b"\xff" * 50),
)  # fmt: skip
_PATHS = (
    b"",
    b"/",
    b"//",
    b"/fl.v1.Coordinator/",
    b"/fl.v1.Coordinator/Nothing",
    b"/x/y",
    b"*",
    b"\xff/\x00",
    b"x" * 120,
)
_TYPES = (b"", b"text/html", b"application/grpc+json", b"application/grpc;x=1", b"application/json", b"\xff")


def changed_call(random: Random, path: str, raw: bytes) -> list[bytes]:
    """The frames of a call with one thing wrong, sometimes more."""
    call = RawCall(path.encode(), message(raw))
    draw = random.random()
    if draw < 0.2:
        call.extra += [random.choice(_HEADERS) for _ in range(random.choice((1, 2, 50)))]
    elif draw < 0.3:
        call.path = random.choice(_PATHS)
    elif draw < 0.4:
        call.content_type = random.choice(_TYPES)
    elif draw < 0.45:
        call.method = random.choice((b"GET", b"PUT", b"", b"CONNECT", b"\x00"))
    elif draw < 0.6:
        call.body = random.choice((
            message(raw, 1), message(raw, 255), b"", b"\x00", message(raw) * 2, message(raw)[:-1],
            b"\x00\xff\xff\xff\xff" + raw, b"\x00\x7f\xff\xff\xff", message(raw) + b"\x01",
        ))  # fmt: skip
        if random.random() < 0.5:
            call.extra.append((b"grpc-encoding", random.choice((b"gzip", b"deflate", b"identity", b"snappy"))))
    elif draw < 0.8:
        call.more_frames += [_odd_frame(random) for _ in range(random.choice((1, 1, 3, 100)))]
    frames = call.frames()
    if draw >= 0.7:
        at = random.randrange(len(frames))
        frames[at] = damaged(random, frames[at], 1)
    return frames


def _odd_frame(random: Random) -> bytes:
    kind = random.choice((*range(10), 11, 255))
    payload = random.choice((b"", bytes(4), bytes(8), random.randbytes(random.randrange(40)), b"\xff" * 16))
    return frame(kind, payload, random.randrange(256), random.choice((0, 1, 1, 2, 3, 2**31 - 1, 2**32 - 1)))
