"""A certificate authority for tests, and the files that it issues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fl_common.certificates.names import SERVING_ROLES
from fl_ops.admin.settings import Certificates
from fl_ops.certificates import ca
from tests.processes.planted import plant


class Pki:
    """An authority in a folder. Each leaf is a pair of files NAME.crt and NAME.key that only their owner can read."""

    def __init__(self, folder: Path, name: str = "Tests", role: str = "") -> None:
        """role: of an authority of `fl ca limited ROLE`; empty: an authority for all roles."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = ca.make_authority(name, ca.Validity(datetime.now(UTC) - timedelta(days=1), 30), role)
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(ca.certificate_pem(self.authority.certificate))

    def issue(
        self, role: str, name: str, days: int = 7, begins: float = 0, hosts: tuple[str, ...] = ("127.0.0.1",)
    ) -> Certificates:
        """A leaf as `fl ca issue` makes it.

        role: one of ROLES. begins: days from now. hosts: only for a server or a worker.
        """
        validity = ca.Validity(datetime.now(UTC) + timedelta(days=begins), days)
        identity = ca.Identity(role, name, hosts if role in SERVING_ROLES else ())
        certificate, key = ca.issue(self.authority, identity, validity)
        return self._written(f"{role}-{name}", certificate, key)

    def forge(
        self,
        stem: str,
        names: list[x509.GeneralName],
        ends: datetime | None = None,
        starts: datetime | None = None,
    ) -> Certificates:
        """A client's leaf with any alternative names, signed by the authority.

        ends: when it expires; None: in a week. starts: when it is valid first; None: some minutes ago.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, stem[:60])]))
            .issuer_name(self.authority.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(starts or now - timedelta(minutes=5))
            .not_valid_after(ends or now + timedelta(days=7))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return self._written(stem, builder.sign(self.authority.key, hashes.SHA256()), key)

    def _written(self, stem: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Certificates:
        files = Certificates(self.ca, self.folder / f"{stem}.crt", self.folder / f"{stem}.key")
        files.cert.write_bytes(ca.certificate_pem(certificate))
        files.key.touch(0o600)
        pem = ca.key_pem(key)
        files.key.write_bytes(pem)
        plant(pem.decode().splitlines()[1], "a private key")
        return files


def credentials(files: Certificates) -> grpc.ChannelCredentials:
    """Credentials for a channel of the holder."""
    return grpc.ssl_channel_credentials(files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes())


def server_section(files: Certificates) -> dict[str, str]:
    """A coordinator's [tls] section."""
    return {"client_ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}


def page_section(pki: Pki) -> dict[str, str]:
    """A coordinator's [web_tls] section, with a certificate of its own."""
    files = pki.issue("server", "page", hosts=("127.0.0.1", "localhost"))
    return {"cert": str(files.cert), "key": str(files.key)}


def section(files: Certificates) -> dict[str, str]:
    """A daemon's [tls] section."""
    return {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
