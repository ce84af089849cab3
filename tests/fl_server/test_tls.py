"""Who is calling, as certificates say it: over real connections, with real certificates."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import grpc
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client import CollectorRegistry

from fl_ops import ca
from fl_server import identity
from fl_server import tls as tls_module
from fl_server.config import TlsConfig
from fl_server.interceptors import CallInterceptor, CallPolicy
from fl_server.metrics import Metrics
from fl_server.rpc import expiry
from fl_server.rpc.callers import Callers
from fl_server.rpc.expiry import OpenCalls
from fl_server.tls import Certificates
from protos.settings import SettingsError
from protos.status import detail_of
from tests.fl_server.echo import Ends, calling

NOW = datetime.now(UTC)
DECADE = ca.Validity(NOW - timedelta(days=2), 3650)
QUARTER = ca.Validity(NOW - timedelta(days=1), 90)


@dataclass
class Site:
    """An authority, and the settings of a coordinator with its certificate."""

    authority: ca.Authority
    tls: TlsConfig

    def holder(self, role, name, ends=None):
        """What somebody with a certificate of ours connects with. ends: when it is over, QUARTER's end without."""
        if ends is not None:
            return self.stray(f"fl://{role}/{name}", ends=ends)
        return self._credentials(*ca.issue(self.authority, ca.Identity(role, name), QUARTER))

    def stray(self, *names, ends=QUARTER.end):
        """A certificate that the authority signed for other purposes, without a common name."""
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

    def nobody(self):
        """A connection that trusts the coordinator and shows nothing."""
        return grpc.ssl_channel_credentials(self.root)

    @property
    def root(self):
        return ca.certificate_pem(self.authority.certificate)

    def _credentials(self, certificate, key):
        return grpc.ssl_channel_credentials(self.root, ca.key_pem(key), ca.certificate_pem(certificate))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site with its files in a folder."""
    folder = tmp_path_factory.mktemp("site")
    authority = ca.make_authority("Test CA", DECADE)
    certificate, key = ca.issue(authority, ca.Identity("server", "coordinator", ("localhost", "127.0.0.1")), QUARTER)
    (folder / "ca.pem").write_bytes(ca.certificate_pem(authority.certificate))
    (folder / "cert.pem").write_bytes(ca.certificate_pem(certificate))
    (folder / "key.pem").touch(0o600)
    (folder / "key.pem").write_bytes(ca.key_pem(key))
    return Site(authority, TlsConfig(cert=folder / "cert.pem", key=folder / "key.pem", client_ca=folder / "ca.pem"))


async def who(request, context):
    """The caller, as the service sees it."""
    return str(identity.caller.get()).encode()


async def answer(site, credentials, service="fl.v1.Coordinator", tls=None):
    """What `who` says to a holder of these credentials."""
    metrics = Metrics(CollectorRegistry())
    async with calling(
        metrics, service, Ends(Certificates(tls or site.tls, metrics).credentials(), credentials), One=who
    ) as caller:
        return await caller.one()


async def refused(site, credentials, service="fl.v1.Coordinator"):
    """The status with which they are refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(site, credentials, service)
    return caught.value


async def test_a_certificate_says_who_calls(site):
    """Role and name come from the certificate, for as long as the call lasts and no longer."""
    before = identity.caller.get()
    assert await answer(site, site.holder("client", "edge-3")) == b"client:edge-3"
    assert await answer(site, site.holder("admin", "alice"), "fl.v1.Admin") == b"admin:alice"
    assert identity.caller.get() is before


@pytest.mark.parametrize(
    ("role", "service", "needed"), [("client", "fl.v1.Admin", "admin"), ("admin", "fl.v1.Coordinator", "client")]
)
async def test_another_role_is_refused(site, role, service, needed):
    """Clients are no admins, and admins no clients."""
    came = await refused(site, site.holder(role, "eve"), service)
    assert came.code() is grpc.StatusCode.PERMISSION_DENIED
    assert came.details() == f"{role}:eve is not allowed to do this; needed: a certificate with the role {needed}"


@pytest.mark.parametrize("names", [(), ("https://example.org/x",)], ids=["none", "foreign"])
@pytest.mark.parametrize("service", ["fl.v1.Admin", "fl.v1.Coordinator"])
async def test_a_certificate_without_our_name_is_nobody(site, names, service):
    """Signed by the right authority and yet no identity: refused, and never taken for plain text."""
    came = await refused(site, site.stray(*names), service)
    assert came.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "a certificate without an fl:// name" in came.details()


async def test_open_calls_end_with_the_certificate(site, monkeypatch):
    """A stream of answers and one of requests, on one connection, end in words; a further call is refused as well."""
    monkeypatch.setattr(expiry, "LOOK_S", 0.05)
    metrics, open_calls = Metrics(CollectorRegistry()), [asyncio.Event(), asyncio.Event()]

    async def down(request, context):
        yield b"first"
        open_calls[0].set()
        await asyncio.Event().wait()

    async def up(requests, context):
        open_calls[1].set()
        await asyncio.Event().wait()

    credentials = site.holder("client", "edge-3", ends=datetime.now(UTC) + timedelta(seconds=3))
    ends = Ends(Certificates(site.tls, metrics).credentials(), credentials)
    async with calling(metrics, "fl.v1.Coordinator", ends, One=who, Down=down, Up=up) as caller:
        assert await caller.one() == b"client:edge-3"
        streams = [asyncio.ensure_future(caller.down()), asyncio.ensure_future(caller.up(b"1"))]
        for opened in open_calls:
            await opened.wait()
        for each in (*streams, None):
            with pytest.raises(grpc.aio.AioRpcError, match="the certificate of client:edge-3 ended on") as caught:
                await (caller.one() if each is None else each)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert detail_of(caught.value.trailing_metadata()) is None


async def test_a_call_that_is_over_is_not_watched(site):
    """Nothing is kept of the calls of a certificate that is valid for long."""
    calls = OpenCalls()
    who = identity.Identity("client", "a", ends=time.time() + 1e6)
    with calls.while_valid(who):
        assert len(calls) == 1
    with calls.while_valid(identity.ANYBODY):
        assert len(calls) == 0
    with pytest.raises(asyncio.CancelledError), calls.while_valid(who):
        raise asyncio.CancelledError  # by the caller, who hung up
    assert len(calls) == 0


async def test_no_certificate_is_no_connection(site):
    """Where a CA for clients is named, a caller without certificate does not get through the handshake."""
    assert (await refused(site, site.nobody())).code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_ca_for_clients_names_are_as_claimed(site):
    """TLS alone tells nobody apart: the caller has no identity, and is let through."""
    open_tls = TlsConfig(cert=site.tls.cert, key=site.tls.key)
    assert await answer(site, site.nobody(), tls=open_tls) == b"anybody:"


@pytest.mark.parametrize("key", ["cert", "key", "client_ca"])
def test_files_that_cannot_be_used_are_named(site, tmp_path, key):
    """The message has the setting and the path, for a file that is missing and for one that is no PEM."""
    path = tmp_path / "x.pem"
    with pytest.raises(SettingsError, match=f"tls.{key}: {path} cannot be read: No such file"):
        Certificates(site.tls.model_copy(update={key: path}), Metrics(CollectorRegistry()))
    path.write_text("hello")
    with pytest.raises(SettingsError, match=f"tls.{key}: expected a PEM file, got {path} without any -----BEGIN"):
        Certificates(site.tls.model_copy(update={key: path}), Metrics(CollectorRegistry()))


@pytest.fixture
def renewable(site, tmp_path):
    """The site's files, to be written over; and a way to issue the coordinator anew, by whichever authority."""
    for name, path in (("cert", site.tls.cert), ("key", site.tls.key), ("client_ca", site.tls.client_ca)):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(path.read_bytes())
    tls = TlsConfig(cert=tmp_path / "cert", key=tmp_path / "key", client_ca=tmp_path / "client_ca")

    def issue(authority=site.authority):
        identity = ca.Identity("server", "coordinator", ("localhost", "127.0.0.1"))
        certificate, key = ca.issue(authority, identity, QUARTER)
        return ca.certificate_pem(certificate), ca.key_pem(key)

    return tls, issue


async def shown_to(caller, server):
    """The answer to a newcomer, who is called `caller`, on a connection of its own; None if there is none."""
    async with grpc.aio.secure_channel(server, caller) as channel:
        try:
            return await channel.unary_unary("/fl.v1.Coordinator/One")(b"", timeout=20)
        except grpc.aio.AioRpcError:
            return None


@pytest.fixture
async def port(renewable, monkeypatch):
    """A server with `who`, whose certificates are looked at all the time."""
    monkeypatch.setattr(tls_module, "LOOK_S", 0.01)
    metrics = Metrics(CollectorRegistry())
    certificates = Certificates(renewable[0], metrics)
    server = grpc.aio.server(interceptors=[CallInterceptor(CallPolicy(metrics, Callers(64, 1000)))])
    one = {"One": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fl.v1.Coordinator", one),))
    number = server.add_secure_port("127.0.0.1:0", certificates.credentials())
    await server.start()
    watching = asyncio.create_task(certificates.watch())
    with structlog.testing.capture_logs() as logs:
        yield f"127.0.0.1:{number}", logs, metrics
    watching.cancel()
    await server.stop(None)


async def told(logs, event):
    """Wait until the log has it."""
    async with asyncio.timeout(20):
        while not any(line["event"] == event for line in logs):
            await asyncio.sleep(0.01)


async def test_another_authority_is_taken_up_without_a_restart(site, renewable, port):
    """A connection that is open goes on; newcomers need the authority that is in the file now."""
    (tls, issue), (address, _, metrics) = renewable, port
    other = ca.make_authority("Next CA", DECADE)
    made, key = ca.issue(other, ca.Identity("client", "edge-3"), QUARTER)
    root = ca.certificate_pem(other.certificate)
    newcomer = grpc.ssl_channel_credentials(root, ca.key_pem(key), ca.certificate_pem(made))
    async with grpc.aio.secure_channel(address, site.holder("client", "edge-3")) as channel:
        call = channel.unary_unary("/fl.v1.Coordinator/One")
        assert await call(b"", timeout=20) == b"client:edge-3"
        assert await shown_to(newcomer, address) is None
        tls.cert.write_bytes((pair := issue(other))[0])
        tls.key.write_bytes(pair[1])
        tls.client_ca.write_bytes(root)
        async with asyncio.timeout(20):
            while await shown_to(newcomer, address) != b"client:edge-3":
                await asyncio.sleep(0.01)
        assert await shown_to(site.holder("client", "edge-3"), address) is None
        assert await call(b"", timeout=20) == b"client:edge-3"
    ends = metrics.registry.get_sample_value("fl_certificate_expiry_timestamp_seconds", {"file": "ca"})
    assert ends == other.certificate.not_valid_after_utc.timestamp()


async def test_half_of_a_renewal_does_no_harm(site, renewable, port):
    """A certificate without its key is told in words, and newcomers are served with what was there before."""
    (tls, issue), (address, logs, _) = renewable, port
    certificate, key = issue()
    tls.cert.write_bytes(certificate)
    await told(logs, "certificates_not_used")
    assert "tls.key: expected the private key of" in next(line["reason"] for line in logs)
    assert await shown_to(site.holder("client", "edge-3"), address) == b"client:edge-3"
    tls.key.write_bytes(key)
    await told(logs, "certificates_renewed")
    assert await shown_to(site.holder("client", "edge-3"), address) == b"client:edge-3"
