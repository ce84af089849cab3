"""Whether it is a coordinator that answers, and whether it would take this device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fl_client.config import ClientConfig
from fl_client.errors import NotAllowed, ProtocolMismatch, TransportError
from fl_client.identity import identity_of
from fl_client.setup.findings import Finding, fail, ok
from fl_client.setup.handshake import speaks_tls
from fl_client.transport import GrpcTransport
from protos.fl.v1 import coordinator_pb2 as pb
from protos.pem import PemFiles
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN


def look(config: ClientConfig) -> Iterator[Finding]:
    """Ask to register with a protocol that nobody speaks.

    A coordinator looks at certificate and name first and then refuses, with the versions that it speaks. No session is
    opened, so a daemon of the same identity that runs is not fenced.
    """
    try:
        asyncio.run(_register(config))
    except ProtocolMismatch as refusal:
        yield _spoken(config, refusal)
    except NotAllowed as refusal:
        yield fail("coordinator", f"expected to be let in as {identity_of(config)}, got: {refusal}", _OPERATOR)
    except TransportError as error:
        yield _no_answer(config, error)
    else:
        yield ok("coordinator", f"{config.server} answers")


async def _register(config: ClientConfig) -> None:
    tls = None if config.tls is None else PemFiles(config.tls.cert, config.tls.key, config.tls.ca).read()
    transport = GrpcTransport(config.server, tls)
    try:
        await transport.register(pb.RegisterRequest(client_id=identity_of(config), protocol=pb.ProtocolRange()))
    finally:
        await transport.close()


def _spoken(config: ClientConfig, refusal: ProtocolMismatch) -> Finding:
    low, high = refusal.spoken
    if high < PROTOCOL_MIN or low > PROTOCOL_MAX:
        said = f"expected a coordinator that speaks protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}, got {low} to {high}"
        return fail("coordinator", said, "upgrade the older one: pip install --upgrade impetus-fl")
    return ok("coordinator", f"speaks protocol {low} to {high}, and lets {identity_of(config)} in")


def _no_answer(config: ClientConfig, error: TransportError) -> Finding:
    said = f"expected a coordinator's answer, got: {error}"
    if config.tls is None and speaks_tls(config):
        return fail("coordinator", f"{said}. TLS answers there", "add [tls] with ca, cert and key, without insecure")
    return fail("coordinator", said, "is this the port of the coordinator's `listen`, not of an operator's or another?")


_OPERATOR = "ask the coordinator's operator, who sees it in the log, and makes certificates with `fl ca issue client`"
