"""Certificates of one test: an authority, and what it issues to honest and to hostile holders, as files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fl_ops import ca
from fl_ops.settings import Certificates


class Pki:
    """One authority in a folder. Every leaf is a pair of files NAME.crt and NAME.key, readable by their owner only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = ca.make_authority("Hostile tests", ca.Validity(datetime.now(UTC) - timedelta(days=1), 30))
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(ca.certificate_pem(self.authority.certificate))

    def issue(self, role: str, name: str, days: int = 7) -> Certificates:
        """A leaf as `fl ca issue` makes it. role: "server", "client" or "admin"."""
        hosts = ("127.0.0.1",) if role == "server" else ()
        certificate, key = ca.issue(
            self.authority, ca.Identity(role, name, hosts), ca.Validity(datetime.now(UTC), days)
        )
        return self._written(f"{role}-{name}", certificate, key)

    def forge(self, stem: str, names: list[x509.GeneralName], ends: datetime | None = None) -> Certificates:
        """A client's leaf with these alternative names, whatever they are, signed by the authority.

        ends: when it expires; None: in a week.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, stem[:60])]))
            .issuer_name(self.authority.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(ends or now + timedelta(days=7))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return self._written(stem, builder.sign(self.authority.key, hashes.SHA256()), key)

    def _written(self, stem: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Certificates:
        files = Certificates(self.ca, self.folder / f"{stem}.crt", self.folder / f"{stem}.key")
        files.cert.write_bytes(ca.certificate_pem(certificate))
        files.key.touch(0o600)
        files.key.write_bytes(ca.key_pem(key))
        return files


def credentials(files: Certificates) -> grpc.ChannelCredentials:
    """What a channel of the holder is made with."""
    return grpc.ssl_channel_credentials(files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes())


def section(files: Certificates) -> dict[str, str]:
    """A daemon's [tls] section."""
    return {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
