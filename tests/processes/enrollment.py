"""A device that enrolls on the generated stubs: a test chooses every part of its request, valid or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fl_client.__main__ import main
from fl_ops.certificates import ca
from protos.fl.v1 import admin_pb2, enrollment_pb2_grpc
from protos.fl.v1 import enrollment_pb2 as pb
from tests.processes.certificates import Pki
from tests.processes.federation import SecureCoordinator
from tests.processes.planted import plant
from tests.processes.process import TIMEOUT_S, Workspace, write_toml

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key as a device makes it."""
    return ec.generate_private_key(ec.SECP256R1())


def csr_of(
    key: Key, common_name: str = "", names: Sequence[x509.GeneralName] = (), digest: hashes.SHA224 | None = None
) -> bytes:
    """A certificate request in DER."""
    subject = [x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)] if common_name else []
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(subject))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
    return builder.sign(key, digest or hashes.SHA256()).public_bytes(Encoding.DER)


@dataclass
class RawDevice:
    """A device with a key, and the certificate that it got."""

    server: EnrollingCoordinator
    key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    issued: pb.IssuedCertificate = field(default_factory=pb.IssuedCertificate)

    def enroll(self, token: str, csr: bytes | None = None, name: str = "") -> pb.IssuedCertificate:
        """Get a certificate for a token. Raises grpc.RpcError."""
        request = pb.EnrollRequest(token=token, csr=csr_of(self.key) if csr is None else csr, name=name)
        with self.server.enrolling() as channel:
            stub: Any = enrollment_pb2_grpc.EnrollmentStub(channel)
            self.issued = stub.Enroll(request, timeout=TIMEOUT_S).issued
        return self.issued

    def renew(self, csr: bytes | None = None, channel: grpc.Channel | None = None) -> pb.IssuedCertificate:
        """Get another certificate for this one. channel: an open one; None for a new one."""
        request = pb.RenewRequest(csr=csr or csr_of(self.key))
        if channel is None:
            with grpc.secure_channel(self.server.address, self.credentials()) as own:
                return self.renew(request.csr, own)
        stub: Any = enrollment_pb2_grpc.CertificatesStub(channel)
        issued: pb.IssuedCertificate = stub.Renew(request, timeout=TIMEOUT_S).issued
        return issued

    def reenroll(self, key: ec.EllipticCurvePrivateKey, proof: ec.EllipticCurvePrivateKey | None = None) -> Any:
        """Get a certificate for a new key, proved by the old one. Raises grpc.RpcError."""
        csr = csr_of(key)
        signature = (proof or self.key).sign(csr, ec.ECDSA(hashes.SHA256()))
        request = pb.ReenrollRequest(certificate=self.issued.chain, csr=csr, signature=signature)
        with self.server.enrolling() as channel:
            stub: Any = enrollment_pb2_grpc.EnrollmentStub(channel)
            return stub.Reenroll(request, timeout=TIMEOUT_S).issued

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials with the certificate."""
        return grpc.ssl_channel_credentials(self.issued.authority, self.key_pem, self.issued.chain)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def leaf(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.issued.chain)


class EnrollingCoordinator(SecureCoordinator):
    """A coordinator with an authority and a port for enrollment."""

    def __init__(
        self,
        workspace: Workspace,
        pki: Pki,
        settings: Mapping[str, Any] | None = None,
        name: str = "server",
        **enrollment: Any,
    ) -> None:
        """enrollment: keys of the section [enrollment]."""
        self.pki = pki
        ca_key = write_key(pki)
        section = {"ca_cert": str(pki.ca), "ca_key": str(ca_key), **enrollment}
        listen = {"enroll_listen": "127.0.0.1:0", "enroll_address": "fl.example.org:7074"}
        super().__init__(workspace, pki, {**listen, "enrollment": section, **(settings or {})}, name)

    def configure(self) -> None:
        """Write the settings again, for the next start."""
        write_toml(self.config, self.settings)

    def enrolling(self) -> grpc.Channel:
        """A channel to the port for enrollment, as a device opens it once it knows the authority."""
        root = grpc.ssl_channel_credentials(self.pki.ca.read_bytes())
        return grpc.secure_channel(str(self.settings["enroll_listen"]), root)

    @property
    def enroll_address(self) -> str:
        """host:port for devices without a certificate."""
        return str(self.settings["enroll_listen"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the authority."""
        return self.pki.authority.certificate.fingerprint(hashes.SHA256()).hex()

    def create_token(self, name: str = "", ttl_s: float = 0, **spec: Any) -> str:
        """A token for one device; returns its text. ttl_s: its validity; 0: the coordinator's default."""
        with self.admin() as admin:
            specs = [admin_pb2.EnrollmentSpec(name=name, **spec)]
            request = admin_pb2.CreateEnrollmentsRequest(specs=specs, ttl_s=ttl_s)
            created = admin.call(request, admin_pb2.CreateEnrollmentsResponse).created
            return plant(created[0].token, "an enrollment token")

    def enroll(self, name: str, token: str, state_dir: Path, *more: str) -> int:
        """Run `fl-client init` for a certificate alone; gives the exit code."""
        return self.init(token, "--only-certificate", "--client-id", name, "--state-dir", str(state_dir), *more)

    def init(self, token: str, *more: str) -> int:
        """Run `fl-client init` with these flags; gives the exit code."""
        where = ["--server", self.address, "--enroll-server", self.enroll_address]
        return main(["init", *where, "--ca-fingerprint", self.fingerprint, "--token", token, *more])

    def enrolled(self, name: str) -> RawDevice:
        """A new device with a certificate of this name."""
        device = RawDevice(self)
        device.enroll(self.create_token(name))
        return device


def write_key(pki: Pki) -> Path:
    """The authority's key as a file for the coordinator."""
    path = pki.folder / "ca.key"
    path.touch(0o600)
    path.write_bytes(ca.key_pem(pki.authority.key))
    return path


def error_of(call: Callable[[], Any]) -> grpc.RpcError:
    """The error of a call that must be refused."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value
