"""Callers' identities from certificates, over real connections."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client import CollectorRegistry

from fl_common.certificates.leaf import period_of
from fl_common.settings import SettingsError
from fl_ops.certificates import ca
from fl_server import identity
from fl_server.metrics import Metrics
from fl_server.rpc import call_limits as calls
from fl_server.rpc import listening
from fl_server.rpc.call_limits import ExpiringCalls
from fl_server.rpc.interceptors import CallInterceptor
from fl_server.rpc.listening import SETTLED_S, Certificates, ConnectionWatch
from fl_server.settings.sections import TlsConfig
from protos.status import detail_of
from tests.fl_server.echo import Credentials, calling, echo_policy
from tests.fl_server.harness import TIMEOUT_S

NOW = datetime.now(UTC)
Logs = list[MutableMapping[str, Any]]
"""Captured log lines."""
DECADE = ca.Validity(NOW - timedelta(days=2), 3650)
QUARTER = ca.Validity(NOW - timedelta(days=1), 90)


@dataclass
class Site:
    """An authority, and the settings of a coordinator with its certificate."""

    authority: ca.Authority
    tls: TlsConfig

    def credentials(self, role: str, name: str, ends: datetime | None = None) -> grpc.ChannelCredentials:
        """Credentials with a certificate of this site's authority. ends: its expiry, the end of QUARTER by default."""
        if ends is not None:
            return self.credentials_with_names(f"fl://{role}/{name}", ends=ends)
        return self._credentials(*ca.issue(self.authority, ca.Identity(role, name), QUARTER))

    def credentials_with_names(self, *names: str, ends: datetime = QUARTER.end) -> grpc.ChannelCredentials:
        """Credentials with a certificate for another purpose, without a common name."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.authority.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(QUARTER.start)
            .not_valid_after(ends)
        )
        if names:
            alternative = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name) for name in names])
            builder = builder.add_extension(alternative, critical=True)
        return self._credentials(builder.sign(self.authority.key, hashes.SHA256()), key)

    def without_certificate(self) -> grpc.ChannelCredentials:
        """Credentials without a client certificate."""
        return grpc.ssl_channel_credentials(self.root)

    @property
    def root(self) -> bytes:
        return ca.certificate_pem(self.authority.certificate)

    def _credentials(self, certificate: Any, key: Any) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root, ca.key_pem(key), ca.certificate_pem(certificate))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A site with its files in a folder."""
    folder = tmp_path_factory.mktemp("site")
    authority = ca.make_authority("Test CA", DECADE)
    certificate, key = ca.issue(authority, ca.Identity("server", "coordinator", ("localhost", "127.0.0.1")), QUARTER)
    (folder / "ca.pem").write_bytes(ca.certificate_pem(authority.certificate))
    (folder / "cert.pem").write_bytes(ca.certificate_pem(certificate))
    (folder / "key.pem").touch(0o600)
    (folder / "key.pem").write_bytes(ca.key_pem(key))
    return Site(authority, TlsConfig(cert=folder / "cert.pem", key=folder / "key.pem", client_ca=folder / "ca.pem"))


async def return_caller(request: Any, context: Any) -> bytes:
    """The caller, as the service sees it."""
    return str(identity.caller.get()).encode()


async def caller_of(
    site: Site, credentials: grpc.ChannelCredentials, service: str = "fl.v1.Coordinator", tls: TlsConfig | None = None
) -> bytes:
    """The response of `return_caller` to a caller with these credentials."""
    metrics = Metrics(CollectorRegistry())
    async with calling(
        metrics,
        service,
        Credentials(Certificates(tls or site.tls, metrics).credentials(), credentials),
        One=return_caller,
    ) as caller:
        return await caller.one()


async def refusal_of(
    site: Site, credentials: grpc.ChannelCredentials, service: str = "fl.v1.Coordinator"
) -> grpc.aio.AioRpcError:
    """The error of a call with these credentials."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller_of(site, credentials, service)
    return caught.value


async def test_a_certificate_identifies_the_caller(site: Site) -> None:
    """Role and name come from the certificate, and hold only during the call."""
    before = identity.caller.get()
    assert await caller_of(site, site.credentials("client", "edge-3")) == b"client:edge-3"
    assert await caller_of(site, site.credentials("admin", "alice"), "fl.v1.Admin") == b"admin:alice"
    assert identity.caller.get() is before


@pytest.mark.parametrize(
    ("role", "service", "needed"), [("client", "fl.v1.Admin", "admin"), ("admin", "fl.v1.Coordinator", "client")]
)
async def test_another_role_is_refused(site: Site, role: str, service: str, needed: str) -> None:
    """Clients are not admins, and admins are not clients."""
    error = await refusal_of(site, site.credentials(role, "eve"), service)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert error.details() == f"{role}:eve is not allowed to do this; needed: the role {needed}"


@pytest.mark.parametrize("names", [(), ("https://example.org/x",)], ids=["none", "foreign"])
@pytest.mark.parametrize("service", ["fl.v1.Admin", "fl.v1.Coordinator"])
async def test_a_certificate_without_an_identity_is_refused(site: Site, names: str, service: str) -> None:
    """Signed by the right authority but without an identity: refused, and never treated as plain text."""
    error = await refusal_of(site, site.credentials_with_names(*names), service)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "a certificate without an fl:// name" in (error.details() or "")


async def test_open_calls_end_with_the_certificate(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of responses and one of requests on a connection end with an error; a further call is refused."""
    monkeypatch.setattr(calls, "CHECK_S", 0.05)
    metrics, open_calls = Metrics(CollectorRegistry()), [asyncio.Event(), asyncio.Event()]
    server = Certificates(site.tls, metrics).credentials()

    async def down(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        open_calls[0].set()
        await asyncio.Event().wait()

    async def up(requests: Any, context: Any) -> None:
        open_calls[1].set()
        await asyncio.Event().wait()

    async def opened() -> None:
        for event in open_calls:
            await event.wait()

    for seconds in (2, 6, 60):  # the first validity in which this machine opens both calls
        credentials = site.credentials("client", "edge-3", ends=datetime.now(UTC) + timedelta(seconds=seconds))
        ends = Credentials(server, credentials)
        async with calling(metrics, "fl.v1.Coordinator", ends, One=return_caller, Down=down, Up=up) as caller:
            streams = [asyncio.ensure_future(caller.down()), asyncio.ensure_future(caller.up(b"1"))]
            await asyncio.wait([*streams, both_open := asyncio.ensure_future(opened())], return_when="FIRST_COMPLETED")
            if not both_open.done():
                both_open.cancel()
                await asyncio.gather(both_open, *streams, return_exceptions=True)
                continue
            for each in (*streams, None):
                with pytest.raises(grpc.aio.AioRpcError, match="the certificate of client:edge-3 ended on") as caught:
                    await (caller.one() if each is None else each)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert detail_of(caught.value.trailing_metadata()) is None
            return
    raise AssertionError("no validity was long enough")


async def test_an_ended_call_is_not_watched(site: Site) -> None:
    """Nothing is kept of the calls of a certificate with a long validity."""
    calls = ExpiringCalls()
    holder = identity.Identity("client", "a", ends=time.time() + 1e6)
    with calls.while_valid(holder):
        assert len(calls) == 1
    with calls.while_valid(identity.ANYBODY):
        assert len(calls) == 0
    with pytest.raises(asyncio.CancelledError), calls.while_valid(holder):
        raise asyncio.CancelledError  # by the caller
    assert len(calls) == 0


async def test_an_expired_certificate_is_counted_and_logged(site: Site) -> None:
    """The coordinator gets no call from it; the other client's connection is no failure."""
    metrics = Metrics(CollectorRegistry())
    watch = ConnectionWatch({"listen": "127.0.0.1:1"}, {"listen": 300}, metrics)
    began = metrics.handshakes.labels("listen").inc
    expired = site.credentials("client", "edge-3", ends=datetime.now(UTC) - timedelta(seconds=60))
    ends = Credentials(Certificates(site.tls, metrics).credentials(began), expired)
    with structlog.testing.capture_logs() as logs:
        async with calling(metrics, "fl.v1.Coordinator", ends, One=return_caller) as caller:
            with pytest.raises(grpc.aio.AioRpcError, match="Socket closed") as caught:
                await caller.one()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        ends = Credentials(Certificates(site.tls, metrics).credentials(began), site.credentials("client", "edge-4"))
        async with calling(metrics, "fl.v1.Coordinator", ends, One=return_caller) as caller:
            assert await caller.one() == b"client:edge-4"
        for now in (0.0, SETTLED_S):
            watch.check({1: Counter()}, now)
    value = metrics.registry.get_sample_value
    handshakes = value("fl_tls_handshakes_total", {"port": "listen"}) or 0
    assert value("fl_tls_handshakes_failed_total", {"port": "listen"}) == handshakes - 1 > 0
    assert [(line["event"], line["log_level"], line["handshakes"]) for line in logs] == [
        ("handshakes_failed", "warning", handshakes - 1)
    ]


async def test_without_a_certificate_there_is_no_connection(site: Site) -> None:
    """With a CA for clients, the handshake fails without a certificate."""
    assert (await refusal_of(site, site.without_certificate())).code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_ca_for_clients_callers_have_no_identity(site: Site) -> None:
    """TLS alone identifies no caller: it is accepted without an identity."""
    open_tls = TlsConfig(cert=site.tls.cert, key=site.tls.key)
    assert await caller_of(site, site.without_certificate(), tls=open_tls) == b"anybody:"


@pytest.mark.parametrize("key", ["cert", "key", "client_ca"])
def test_unusable_files_are_named(site: Site, tmp_path: Path, key: str) -> None:
    """The message has the setting and the path of a missing file and of a file that is not PEM."""
    path = tmp_path / "x.pem"
    with pytest.raises(SettingsError, match=f"tls.{key}: {path} cannot be read: No such file"):
        Certificates(site.tls.model_copy(update={key: path}), Metrics(CollectorRegistry()))
    path.write_text("hello")
    with pytest.raises(SettingsError, match=f"tls.{key}: expected a PEM file, got {path} without any -----BEGIN"):
        Certificates(site.tls.model_copy(update={key: path}), Metrics(CollectorRegistry()))


@dataclass
class Renewable:
    """Writable copies of a site's certificate files."""

    authority: ca.Authority
    cert: Path
    key: Path
    client_ca: Path

    def issue(self, authority: ca.Authority | None = None) -> tuple[bytes, bytes]:
        """A new certificate for the coordinator and its key; from the site's own authority by default."""
        identity = ca.Identity("server", "coordinator", ("localhost", "127.0.0.1"))
        certificate, key = ca.issue(authority or self.authority, identity, QUARTER)
        return ca.certificate_pem(certificate), ca.key_pem(key)


@pytest.fixture
def renewable(site: Site, tmp_path: Path) -> Renewable:
    """The site's files in a folder of this test."""
    for name, path in (("cert", site.tls.cert), ("key", site.tls.key), ("client_ca", site.tls.client_ca)):
        assert path is not None
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(path.read_bytes())
    return Renewable(site.authority, tmp_path / "cert", tmp_path / "key", tmp_path / "client_ca")


async def response_to(caller: grpc.ChannelCredentials, address: str) -> bytes | None:
    """The response to a caller on a new connection; None if the call fails."""
    async with grpc.aio.secure_channel(address, caller) as channel:
        try:
            call: Any = channel.unary_unary("/fl.v1.Coordinator/One")
            response: bytes = await call(b"", timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        return response


Port = tuple[str, Logs, Metrics]
"""Address, logs and metrics of a server."""


@pytest.fixture
async def port(renewable: Renewable, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Port]:
    """A server with `return_caller` that checks its certificate files continuously."""
    monkeypatch.setattr(listening, "CHECK_S", 0.01)
    metrics = Metrics(CollectorRegistry())
    tls = TlsConfig(cert=renewable.cert, key=renewable.key, client_ca=renewable.client_ca)
    certificates = Certificates(tls, metrics)
    server = grpc.aio.server(interceptors=[CallInterceptor(echo_policy(metrics))])
    one: dict[str, Any] = {"One": grpc.unary_unary_rpc_method_handler(return_caller)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fl.v1.Coordinator", one),))
    number = server.add_secure_port("127.0.0.1:0", certificates.credentials())
    await server.start()
    watching = asyncio.create_task(check_all(certificates))
    with structlog.testing.capture_logs() as logs:
        yield f"127.0.0.1:{number}", logs, metrics
    watching.cancel()
    await server.stop(None)


async def check_all(certificates: Certificates) -> None:
    """Check the files without end."""
    async for _ in certificates.checks():
        pass


async def logged(logs: Logs, event: str) -> None:
    """Wait until the log has the event."""
    async with asyncio.timeout(TIMEOUT_S):
        while not any(line["event"] == event for line in logs):
            await asyncio.sleep(0.01)


async def test_another_authority_is_used_without_a_restart(site: Site, renewable: Renewable, port: Port) -> None:
    """An open connection continues; new ones need the authority that the file now has."""
    address, _, metrics = port
    other = ca.make_authority("Next CA", DECADE)
    made, key = ca.issue(other, ca.Identity("client", "edge-3"), QUARTER)
    root = ca.certificate_pem(other.certificate)
    newcomer = grpc.ssl_channel_credentials(root, ca.key_pem(key), ca.certificate_pem(made))
    async with grpc.aio.secure_channel(address, site.credentials("client", "edge-3")) as channel:
        call: Any = channel.unary_unary("/fl.v1.Coordinator/One")
        assert await call(b"", timeout=TIMEOUT_S) == b"client:edge-3"
        assert await response_to(newcomer, address) is None
        renewable.cert.write_bytes((pair := renewable.issue(other))[0])
        renewable.key.write_bytes(pair[1])
        renewable.client_ca.write_bytes(root)
        async with asyncio.timeout(TIMEOUT_S):
            while await response_to(newcomer, address) != b"client:edge-3":
                await asyncio.sleep(0.01)
        assert await response_to(site.credentials("client", "edge-3"), address) is None
        assert await call(b"", timeout=TIMEOUT_S) == b"client:edge-3"
    ends = metrics.registry.get_sample_value("fl_certificate_expiry_timestamp_seconds", {"file": "ca"})
    lifetime = metrics.registry.get_sample_value("fl_certificate_lifetime_seconds", {"file": "ca"})
    assert (ends, lifetime) == (other.certificate.not_valid_after_utc.timestamp(), period_of(other.certificate).seconds)


async def test_a_partial_renewal_is_not_used(site: Site, renewable: Renewable, port: Port) -> None:
    """A certificate without its key is logged, and new connections are served with the previous pair."""
    address, logs, _ = port
    certificate, key = renewable.issue()
    renewable.cert.write_bytes(certificate)
    await logged(logs, "certificates_not_used")
    assert "tls.key: expected the private key of" in next(line["reason"] for line in logs)
    assert await response_to(site.credentials("client", "edge-3"), address) == b"client:edge-3"
    renewable.key.write_bytes(key)
    await logged(logs, "certificates_renewed")
    assert await response_to(site.credentials("client", "edge-3"), address) == b"client:edge-3"
