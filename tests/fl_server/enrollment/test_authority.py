"""The authority of the coordinator: its files, and the requests that it reads."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from fl_common.certificates.leaf import Authority as Signer
from fl_common.certificates.names import Holder
from fl_common.certificates.pem import Pem, PemFiles, PemWatcher
from fl_common.settings import SettingsError
from fl_ops.certificates import ca
from fl_server.enrollment.authority import Authority, Validity, read_request
from fl_server.errors import InvalidInput, NotConfigured, NotEnrolled
from tests.fl_server.enrollment.site import authority_of, config_of
from tests.processes.certificates import Pki
from tests.processes.enrollment import csr_of, new_key

EDGE = Holder("client", "edge-7")


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    """An authority in a folder."""
    return Pki(tmp_path / "pki")


def signed(authority: Authority, span: Validity | None = None) -> x509.Certificate:
    """A certificate of edge-7, by default for an hour from now."""
    content = authority.sign(EDGE, new_key().public_key(), span or Validity(time.time(), 3600.0))
    return x509.load_der_x509_certificate(content)


def test_a_certificate_is_for_a_client_only(pki: Pki) -> None:
    """One URI, client authentication and nothing else, signed by the authority, with a random serial number."""
    authority = authority_of(pki)
    leaf, other = signed(authority), signed(authority)
    leaf.verify_directly_issued_by(pki.authority.certificate)
    assert ca.identity_of(leaf) == ca.Identity("client", "edge-7")
    extension: Any = leaf.extensions.get_extension_for_class
    assert list(extension(x509.ExtendedKeyUsage).value) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not extension(x509.BasicConstraints).value.ca
    assert not extension(x509.KeyUsage).value.key_cert_sign
    assert leaf.serial_number != other.serial_number
    assert min(leaf.serial_number, other.serial_number).bit_length() > 100


def test_the_times_of_a_certificate(pki: Pki) -> None:
    """Some minutes before now, for slow clocks, but not before the given begin; and no longer than the authority."""
    now, authority = int(time.time()), authority_of(pki)
    leaf = signed(authority, Validity(now + 0.9, 20.0))
    assert leaf.not_valid_before_utc.timestamp() == now - 300
    assert leaf.not_valid_after_utc.timestamp() == now + 20
    assert signed(authority, Validity(now, 20.0, now + 1.0)).not_valid_before_utc.timestamp() == now + 1
    end = pki.authority.certificate.not_valid_after_utc
    assert signed(authority, Validity(now, 1e8)).not_valid_after_utc == end
    with pytest.raises(NotConfigured, match="its authority has ended"):
        signed(authority, Validity(end.timestamp(), 20.0))


def test_devices_get_the_authority_of_the_coordinator(pki: Pki) -> None:
    """In the handshake behind the coordinator's certificate, in the answer, and as a digest."""
    authority = authority_of(pki)
    root = pki.authority.certificate
    chain = x509.load_pem_x509_certificates(authority.presented().cert)
    assert [chain[0].issuer, chain[1:]] == [root.subject, [root]]
    assert authority.presented() is authority.presented()
    assert authority.presented().ca is None
    assert x509.load_pem_x509_certificates(authority.server_authorities()) == [root]
    assert authority.fingerprint() == hashlib.sha256(root.public_bytes(Encoding.DER)).hexdigest()
    assert x509.load_pem_x509_certificates(authority.chain(signed(authority).public_bytes(Encoding.DER)))[1:] == []


def intermediate(pki: Pki, folder: Path) -> Pki:
    """An authority for devices that another one signed."""
    below = Pki(folder, "Devices")
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Devices")]))
        .issuer_name(pki.authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=7))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    below.authority = Signer(builder.sign(pki.authority.key, hashes.SHA256()), key)
    below.ca.write_bytes(ca.certificate_pem(below.authority.certificate))
    return below


def test_an_intermediate_authority_signs_for_devices(pki: Pki, tmp_path: Path) -> None:
    """Its certificate is part of the chain, and the coordinator's own authority is named by server_ca."""
    devices = intermediate(pki, tmp_path / "devices")
    server = pki.issue("server", "coordinator")
    files = PemWatcher(PemFiles(server.cert, server.key, server.ca))
    authority = Authority(config_of(devices, server_ca=pki.ca), files)
    chain = x509.load_pem_x509_certificates(authority.chain(signed(authority).public_bytes(Encoding.DER)))
    assert chain[1:] == [devices.authority.certificate]
    chain[0].verify_directly_issued_by(devices.authority.certificate)
    assert x509.load_pem_x509_certificates(authority.server_authorities()) == [pki.authority.certificate]


def rsa_authority(pki: Pki) -> None:
    """Put an RSA key and its certificate into the authority's files."""
    key, now = rsa.generate_private_key(65537, 2048), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "RSA")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(9))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    pki.ca.write_bytes(ca.certificate_pem(builder.sign(key, hashes.SHA256())))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (pki.folder / "ca.key").write_bytes(pem)


def a_leaf(pki: Pki) -> None:
    """Put a client's certificate and key into the authority's files."""
    files = pki.issue("client", "eve")
    pki.ca.write_bytes(files.cert.read_bytes())
    (pki.folder / "ca.key").write_bytes(files.key.read_bytes())


def another_key(pki: Pki) -> None:
    """Put another authority's key into the file of the key."""
    (pki.folder / "ca.key").write_bytes(ca.key_pem(new_key()))


def ended(pki: Pki) -> None:
    """Put an authority that has ended into the files."""
    old = ca.make_authority("Old", ca.Validity(datetime.now(UTC) - timedelta(days=9), 2))
    pki.ca.write_bytes(ca.certificate_pem(old.certificate))
    (pki.folder / "ca.key").write_bytes(ca.key_pem(old.key))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda pki: (pki.folder / "ca.key").chmod(0o644), "enrollment.ca_key: expected a private key that only"),
        (lambda pki: (pki.folder / "ca.key").unlink(), "enrollment.ca_key: .*/ca.key cannot be read"),
        (lambda pki: pki.ca.write_text("x"), "enrollment.ca_cert: expected a PEM file"),
        (another_key, "enrollment.ca_key: expected the private key of"),
        (a_leaf, "enrollment.ca_cert: expected the certificate of an authority"),
        (rsa_authority, "enrollment.ca_key: expected an elliptic-curve key"),
        (ended, "enrollment.ca_cert: expected a certificate that is valid now, got one that ended on"),
    ],
    ids=["open mode", "missing", "no pem", "another key", "no authority", "rsa", "ended"],
)  # fmt: skip
def test_unusable_files_are_named(pki: Pki, spoil: Callable[[Pki], Any], text: str) -> None:
    """The message has the setting, at the start."""
    server = pki.issue("server", "coordinator")
    files = PemWatcher(PemFiles(server.cert, server.key, server.ca))
    config = config_of(pki)
    spoil(pki)
    with pytest.raises(SettingsError, match=text):
        Authority(config, files)


@pytest.mark.parametrize(
    ("client_ca", "text"), [("other", "ca_cert: expected an authority of tls.client_ca"), ("own", "server_ca")]
)
def test_an_authority_of_others_is_refused(pki: Pki, tmp_path: Path, client_ca: str, text: str) -> None:
    """Its certificates would be refused at `listen`; or devices could not check the coordinator."""
    other = Pki(tmp_path / "other")
    server = other.issue("server", "coordinator")
    bundle = other.ca.read_bytes() if client_ca == "other" else pki.ca.read_bytes()
    files = PemWatcher(PemFiles(server.cert, server.key, server.ca))
    files.pem = Pem(server.cert.read_bytes(), server.key.read_bytes(), bundle)
    with pytest.raises(SettingsError, match=text):
        Authority(config_of(pki), files)


def test_a_renewed_authority_is_used_without_a_restart(pki: Pki) -> None:
    """After the second poll that finds it; files that do not fit together are logged and not used."""
    authority = authority_of(pki)
    another_key(pki)
    with structlog.testing.capture_logs() as logs:
        authority.poll()
        authority.poll()
    assert [(line["event"], "enrollment.ca_key" in line["reason"]) for line in logs] == [("authority_not_used", True)]
    signed(authority).verify_directly_issued_by(pki.authority.certificate)
    renewed = ca.make_authority("Tests", ca.Validity(datetime.now(UTC) - timedelta(days=1), 30))
    pki.ca.write_bytes(ca.certificate_pem(renewed.certificate))
    (pki.folder / "ca.key").write_bytes(ca.key_pem(renewed.key))
    before = authority.presented()
    for _ in range(2):
        authority.poll()
    signed(authority).verify_directly_issued_by(renewed.certificate)
    assert authority.presented() is not before
    assert authority.period.ends == renewed.certificate.not_valid_after_utc


OWN = x509.UniformResourceIdentifier(EDGE.uri)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_a_request_gives_its_key(curve: ec.EllipticCurve) -> None:
    """With no names, or with the holder's."""
    key = ec.generate_private_key(curve)
    for csr in (csr_of(key), csr_of(key, "edge-7", [OWN])):
        assert read_request(csr, EDGE) == key.public_key()


@pytest.mark.parametrize(
    ("common_name", "names"),
    [
        ("edge-8", []),
        ("fl://client/edge-7", []),
        ("", [x509.UniformResourceIdentifier("fl://client/edge-8")]),
        ("", [x509.UniformResourceIdentifier("fl://admin/edge-7")]),
        ("", [OWN, x509.UniformResourceIdentifier("fl://client/edge-8")]),
        ("", [OWN, x509.DNSName("edge-7")]),
        ("edge-7", [x509.RFC822Name("edge-7@example.org")]),
    ],
)
def test_a_request_that_names_another_holder_is_refused(common_name: str, names: list[x509.GeneralName]) -> None:
    """In its subject or in its alternative names, also beside the right name."""
    with pytest.raises(NotEnrolled, match="a request that names nobody or fl://client/edge-7; it names '"):
        read_request(csr_of(new_key(), common_name, names), EDGE)


@pytest.mark.parametrize(
    ("key", "came"),
    [
        (rsa.generate_private_key(65537, 2048), "RSAPublicKey 2048"),
        (ec.generate_private_key(ec.SECP256K1()), "a key on secp256k1"),
        (ec.generate_private_key(ec.SECP224R1()), "a key on secp224r1"),
    ],
    ids=["rsa", "other curve", "short"],
)
def test_a_weak_or_unsupported_key_is_refused(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, came: str) -> None:
    """The message has the supported kinds and the one that came."""
    with pytest.raises(InvalidInput) as refused:
        read_request(csr_of(key), EDGE)
    assert "an elliptic-curve key on P-256, P-384 or P-521" in str(refused.value)
    assert came in str(refused.value)


def test_a_key_of_another_kind_is_refused() -> None:
    """Ed25519: gRPC's TLS accepts no such certificate."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    csr = builder.sign(ed25519.Ed25519PrivateKey.generate(), None).public_bytes(Encoding.DER)
    with pytest.raises(InvalidInput, match="got Ed25519PublicKey"):
        read_request(csr, EDGE)


def test_a_short_digest_is_refused() -> None:
    """SHA-224."""
    with pytest.raises(InvalidInput, match="signed with SHA-256, SHA-384 or SHA-512, got sha224"):
        read_request(csr_of(new_key(), digest=hashes.SHA224()), EDGE)


def test_a_request_of_a_key_that_its_sender_does_not_have_is_refused() -> None:
    """The signature of another request under this key."""
    mine, other = csr_of(new_key()), csr_of(new_key())
    stolen = x509.load_der_x509_csr(mine).tbs_certrequest_bytes
    signature = x509.load_der_x509_csr(other).signature
    own = x509.load_der_x509_csr(mine).signature
    # Signatures have one of three lengths: the length fields fit if both are the same.
    while len(signature) != len(own):
        other = csr_of(new_key())
        signature = x509.load_der_x509_csr(other).signature
    forged = mine.replace(own, signature)
    assert x509.load_der_x509_csr(forged).tbs_certrequest_bytes == stolen
    with pytest.raises(InvalidInput, match="a request signed by its own key, got another signature"):
        read_request(forged, EDGE)


@pytest.mark.parametrize("csr", [b"", b"\0", b"-----BEGIN", b"0" * 9000])
def test_other_bytes_are_no_request(csr: bytes) -> None:
    """The message has the expected form."""
    with pytest.raises(InvalidInput, match=r"csr: expected a certificate request in DER \(PKCS#10\)"):
        read_request(csr, EDGE)


def test_a_damaged_request_is_refused() -> None:
    """Each byte of a request replaced: it is refused, or a name that nobody uses has changed; nothing else happens."""
    csr = csr_of(new_key(), "edge-7", [OWN])
    for place in range(0, len(csr), 3):
        damaged = csr[:place] + bytes([csr[place] ^ 0x55]) + csr[place + 1 :]
        with pytest.raises((InvalidInput, NotEnrolled)):
            read_request(damaged, EDGE)
