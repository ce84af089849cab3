"""The daemon's identity by certificate, and its messages after a failed handshake."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fl_client.connection.certificates import Certificates
from fl_client.connection.link import RetryDelays
from fl_client.connection.transport import GrpcTransport
from fl_client.errors import ConfigError, Unreachable
from fl_client.monitoring.metrics import Metrics
from fl_client.settings.config import ClientConfig
from fl_client.settings.identity import identity_of
from fl_common.certificates.pem import Pem, PemFiles
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc
from tests.fl_client.fake_coordinator import FakeCoordinator


class Register(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers every registration."""

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """The session's id is the client's."""
        return pb.RegisterResponse(session_id=request.client_id)


Issuer = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
"""A certificate and its key."""


def certificate(path: Path, name: str, alternative: list[x509.GeneralName], issuer: Issuer | None = None) -> Issuer:
    """Write name.pem and name.key, signed by the issuer's (certificate, key) or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if alternative:
        made = made.add_extension(x509.SubjectAlternativeName(alternative), critical=False)
    signed = made.sign(issuer[1] if issuer else key, hashes.SHA256())
    (path / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    (path / f"{name}.key").touch(0o600)
    (path / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
    )
    return signed, key


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    """A folder with an authority, a server, a client edge-3, and a stranger's authority."""
    authority = certificate(tmp_path, "ca", [])
    local: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate(tmp_path, "server", local, authority)
    certificate(tmp_path, "edge", [x509.UniformResourceIdentifier("fl://client/edge-3")], authority)
    certificate(tmp_path, "admin", [x509.UniformResourceIdentifier("fl://admin/alice")], authority)
    certificate(tmp_path, "stranger", [])
    certificate(tmp_path, "two", [x509.UniformResourceIdentifier(f"fl://client/edge-{at}") for at in (3, 4)], authority)
    certificate(tmp_path, "dns", [x509.DNSName("fl://client/edge-3")], authority)
    return tmp_path


def config(pki: Path, cert: str = "edge", **changes: Any) -> ClientConfig:
    """A TLS client's configuration."""
    tls = {"ca": pki / "ca.pem", "cert": pki / f"{cert}.pem", "key": pki / f"{cert}.key"}
    values = {"server": "127.0.0.1:1", "state_dir": pki, "task": {"name": "digits"}, "tls": tls, **changes}
    return ClientConfig.model_validate(values)


def test_the_certificate_names_the_device(pki: Path) -> None:
    """Without a client_id the identity is the certificate's."""
    assert identity_of(config(pki)) == "edge-3"


@pytest.mark.parametrize(
    ("cert", "changes", "words"),
    [
        ("edge", {"client_id": "edge-4"}, "the certificate of 'edge-3', but client_id = 'edge-4'"),
        ("admin", {}, "fl://client/edge-3, got fl://admin/alice"),
        ("stranger", {}, "with one URI fl://ROLE/NAME, got none; `fl ca issue client NAME` makes one"),
        ("two", {}, "got 'fl://client/edge-3', 'fl://client/edge-4'"),
        ("dns", {}, "got none"),
        ("missing", {}, "tls.cert: expected a certificate that can be read"),
    ],
)
def test_another_holders_certificate_is_refused(pki: Path, cert: str, changes: dict[str, Any], words: str) -> None:
    """The message names the holder and the expected one."""
    with pytest.raises(ConfigError) as caught:
        identity_of(config(pki, cert, **changes))
    assert words in str(caught.value)


def test_a_key_is_not_a_certificate(pki: Path) -> None:
    """The wrong file in tls.cert is an error."""
    (pki / "edge.pem").write_bytes((pki / "edge.key").read_bytes())
    with pytest.raises(ConfigError, match=r"tls\.cert: expected a certificate in PEM"):
        identity_of(config(pki))


def test_a_missing_file_is_an_error_at_the_start(pki: Path) -> None:
    """An unreadable file is an error at the start."""
    settings = config(pki).tls
    assert settings is not None
    tls = settings.model_copy(update={"ca": pki / "nothing.pem"})
    with pytest.raises(ConfigError, match=r"tls\.ca: .*nothing.pem cannot be read: No such file"):
        Certificates(tls, "edge-3", Metrics(), RetryDelays())


@pytest.fixture
async def tls_port(pki: Path) -> AsyncIterator[int]:
    """A coordinator that requires client certificates of the authority."""
    server = grpc.aio.server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Register(), server)
    pair = ((pki / "server.key").read_bytes(), (pki / "server.pem").read_bytes())
    credentials = grpc.ssl_server_credentials([pair], (pki / "ca.pem").read_bytes(), require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield port
    await server.stop(None)


def files(pki: Path, name: str, ca: str = "ca") -> Pem:
    """The credentials of a certificate's holder."""
    return PemFiles(pki / f"{name}.pem", pki / f"{name}.key", pki / f"{ca}.pem").read()


async def register(port: int, tls: Pem | None) -> pb.RegisterResponse:
    """The answer to one registration."""
    transport = GrpcTransport(f"127.0.0.1:{port}", tls)
    try:
        return await transport.register(pb.RegisterRequest(client_id="edge-3"))
    finally:
        await transport.close()


async def test_mutual_tls_works(pki: Path, tls_port: int) -> None:
    """Both sides know the authority."""
    response = await register(tls_port, files(pki, "edge", "ca"))
    assert response.session_id == "edge-3"


async def test_an_unknown_authority_is_explained(pki: Path, tls_port: int) -> None:
    """If another CA signed the coordinator's certificate, the message names tls.ca."""
    with pytest.raises(Unreachable, match=r"not signed by tls\.ca"):
        await register(tls_port, files(pki, "edge", "stranger"))


async def test_a_certificate_of_another_authority_is_explained(pki: Path, tls_port: int) -> None:
    """The coordinator does not know who signed the client's certificate."""
    with pytest.raises(Unreachable, match="CA"):
        await register(tls_port, files(pki, "stranger", "ca"))


async def test_plain_text_to_a_tls_coordinator_is_explained(tls_port: int) -> None:
    """The message explains the most frequent mistake."""
    with pytest.raises(Unreachable, match="TLS"):
        await register(tls_port, None)


async def test_tls_to_a_plain_text_coordinator_is_explained(pki: Path, coordinator: FakeCoordinator) -> None:
    """The message names what to change on which side."""
    with pytest.raises(Unreachable, match="uses plain text, this daemon TLS"):
        await register(coordinator.port, files(pki, "edge", "ca"))


async def test_another_kind_of_server_is_explained(pki: Path) -> None:
    """A grpc server without the Coordinator service."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(Unreachable, match="is not a coordinator"):
            await register(port, None)
    finally:
        await server.stop(None)
