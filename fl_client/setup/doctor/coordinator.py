"""Checks whether the server is a coordinator, and whether it accepts this device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from fl_client.connection.session import ask
from fl_client.errors import NotAllowed, ProtocolMismatch, Revoked, TransportError
from fl_client.settings.config import ClientConfig
from fl_client.settings.identity import identity_of
from fl_client.setup.doctor.findings import Finding, fail, ok, warn
from fl_client.setup.doctor.network import uses_tls
from fl_common.certificates.pem import PemFiles
from fl_common.metrics import package_version
from fl_common.names import version_of
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN


def check(config: ClientConfig) -> Iterator[Finding]:
    """Ask the coordinator, without a session."""
    tls = None if config.tls is None else PemFiles(config.tls.cert, config.tls.key, config.tls.ca).read()
    try:
        asyncio.run(ask(config.server, identity_of(config), tls, proxy=config.proxy))
    except ProtocolMismatch as refusal:
        yield _versions(config, refusal)
        yield from _software(*refusal.versions)
        if refusal.clocks:
            message = f"expected the time of the coordinator, got another: {refusal.clocks}"
            yield warn("clock", message, "set the wrong one: sudo timedatectl set-ntp true")
    except Revoked as refusal:
        message = f"expected to be accepted as {identity_of(config)}, got: the certificate is revoked: {refusal}"
        yield fail("coordinator", message, _ENROLL)
    except NotAllowed as refusal:
        yield fail("coordinator", f"expected to be accepted as {identity_of(config)}, got: {refusal}", _OPERATOR)
    except TransportError as error:
        yield _no_answer(config, error)
    else:
        yield ok("coordinator", f"{config.server} answers")


def _versions(config: ClientConfig, refusal: ProtocolMismatch) -> Finding:
    low, high = refusal.supported
    if high < PROTOCOL_MIN or low > PROTOCOL_MAX:
        message = f"expected a coordinator with protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}, got {low} to {high}"
        return fail("coordinator", message, "upgrade the older one: pip install --upgrade impetus-fl")
    return ok("coordinator", f"supports protocol {low} to {high}, and accepts {identity_of(config)}")


def _software(coordinators: str, required: str) -> Iterator[Finding]:
    """What is too old: this device's software for a run, or one side's for the other."""
    own = package_version("impetus-fl")
    here, there, needed = (version_of(f"impetus {version}") for version in (own, coordinators, required))
    upgrade = "pip install --upgrade impetus-fl, and restart the daemon"
    if here < needed:
        message = f"expected impetus {required} or newer, which a run of this coordinator requires, got {own}"
        yield warn("version", message, upgrade)
    elif coordinators and here[:2] < there[:2]:
        yield warn("version", f"impetus {own} works, and is older than the coordinator's {coordinators}", upgrade)
    elif coordinators:
        yield ok("version", f"impetus {own}, and {coordinators} at the coordinator")


def _no_answer(config: ClientConfig, error: TransportError) -> Finding:
    message = f"expected a coordinator's answer, got: {error}"
    if config.tls is None and uses_tls(config):
        return fail(
            "coordinator", f"{message}. The server uses TLS", "add [tls] with ca, cert and key, without insecure"
        )
    return fail(
        "coordinator", message, "is this the port of the coordinator's `listen`, not its admin port or another?"
    )


_OPERATOR = "ask the coordinator's operator: its log has the reason, and `fl ca issue client` makes certificates"
_ENROLL = (
    "the operator makes a token, `fl enroll create --name NAME`; `fl-client init` with it gets a new certificate, which"
    " a running daemon uses without a restart"
)
