"""Who is calling, as certificates say it: over real connections, with real certificates."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client import CollectorRegistry

from fl_ops import ca
from fl_server import identity
from fl_server.config import TlsConfig
from fl_server.metrics import Metrics
from fl_server.tls import server_credentials
from protos.settings import SettingsError
from tests.fl_server.echo import Ends, calling

NOW = datetime.now(UTC)
DECADE = ca.Validity(NOW - timedelta(days=2), 3650)
QUARTER = ca.Validity(NOW - timedelta(days=1), 90)


@dataclass
class Site:
    """An authority, and the settings of a coordinator with its certificate."""

    authority: ca.Authority
    tls: TlsConfig

    def holder(self, role, name):
        """What somebody with a certificate of ours connects with."""
        return self._credentials(*ca.issue(self.authority, ca.Identity(role, name), QUARTER))

    def stray(self, *names):
        """A certificate that the authority signed for other purposes, without a common name."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.authority.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(QUARTER.start)
            .not_valid_after(QUARTER.end)
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
    (folder / "key.pem").write_bytes(ca.key_pem(key))
    return Site(authority, TlsConfig(cert=folder / "cert.pem", key=folder / "key.pem", client_ca=folder / "ca.pem"))


async def who(request, context):
    """The caller, as the service sees it."""
    return str(identity.caller.get()).encode()


async def answer(site, credentials, service="fl.v1.Coordinator", tls=None):
    """What `who` says to a holder of these credentials."""
    metrics = Metrics(CollectorRegistry())
    async with calling(metrics, service, Ends(server_credentials(tls or site.tls), credentials), One=who) as caller:
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
        server_credentials(site.tls.model_copy(update={key: path}))
    path.write_text("hello")
    with pytest.raises(SettingsError, match=f"tls.{key}: expected a PEM file, got {path} without any -----BEGIN"):
        server_credentials(site.tls.model_copy(update={key: path}))
