"""Certificates as other verifiers see them: cryptography's path validation."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fl_ops.certificates import ca

NOW = datetime(2026, 3, 1, tzinfo=UTC)
QUARTER = ca.Validity(NOW, 90)
CLIENT = ca.Identity("client", "edge-3")
SERVER = ca.Identity("server", "coordinator", ("localhost", "127.0.0.1", "::1"))


@pytest.fixture(scope="module")
def authority() -> ca.Authority:
    """An authority of ten years."""
    return ca.make_authority("Test CA", ca.Validity(NOW, 3650))


def policy(authority: ca.Authority, at: datetime) -> PolicyBuilder:
    """Trust in this authority alone, at a moment."""
    return PolicyBuilder().store(Store([authority.certificate])).time(at)


def verify_client(authority: ca.Authority, leaf: x509.Certificate, at: datetime = NOW) -> list[str]:
    """The names under which a server would take this certificate. Raises VerificationError if it would not."""
    verified = policy(authority, at).build_client_verifier().verify(leaf, [])
    return [str(name.value) for name in verified.subjects or []]


@pytest.mark.parametrize("role", ["client", "admin"])
def test_client_certificates_verify(authority: ca.Authority, role: str) -> None:
    """Certificates of clients and admins verify as TLS clients, and their URI has role and name."""
    leaf, _ = ca.issue(authority, ca.Identity(role, "edge-3"), QUARTER)
    assert verify_client(authority, leaf) == [f"fl://{role}/edge-3"]


@pytest.mark.parametrize(
    "host", [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(at)) for at in ("127.0.0.1", "::1"))]
)
def test_server_certificate_verifies(authority: ca.Authority, host: x509.DNSName | x509.IPAddress) -> None:
    """A server's certificate verifies for each of its hosts."""
    leaf, _ = ca.issue(authority, SERVER, QUARTER)
    policy(authority, NOW).build_server_verifier(host).verify(leaf, [])


def test_server_certificate_for_another_host(authority: ca.Authority) -> None:
    """It does not verify for a host that it does not name."""
    leaf, _ = ca.issue(authority, SERVER, QUARTER)
    with pytest.raises(VerificationError):
        policy(authority, NOW).build_server_verifier(x509.DNSName("example.org")).verify(leaf, [])


def test_roles_do_not_mix(authority: ca.Authority) -> None:
    """A server's certificate does not verify as a client's: its extended key usage differs."""
    leaf, _ = ca.issue(authority, SERVER, QUARTER)
    with pytest.raises(VerificationError):
        verify_client(authority, leaf)


def test_another_authority(authority: ca.Authority) -> None:
    """A certificate of another authority of the same name does not verify."""
    stranger = ca.make_authority("Test CA", ca.Validity(NOW, 3650))
    leaf, _ = ca.issue(stranger, CLIENT, QUARTER)
    with pytest.raises(VerificationError):
        verify_client(authority, leaf)


@pytest.mark.parametrize(("days", "valid"), [(-1, False), (0, True), (89, True), (91, False)])
def test_span(authority: ca.Authority, days: int, valid: bool) -> None:
    """It is valid from its issue for the requested number of days, and no longer."""
    leaf, _ = ca.issue(authority, CLIENT, QUARTER)
    at = NOW + timedelta(days=days)
    if valid:
        assert verify_client(authority, leaf, at)
    else:
        with pytest.raises(VerificationError):
            verify_client(authority, leaf, at)


def test_late_clocks(authority: ca.Authority) -> None:
    """A device with a clock four minutes slow accepts it."""
    leaf, _ = ca.issue(authority, CLIENT, QUARTER)
    assert verify_client(authority, leaf, NOW - timedelta(minutes=4))


def test_profile(authority: ca.Authority) -> None:
    """P-256 keys, serial numbers that differ, an end entity with one purpose, linked to its issuer's key."""
    (leaf, key), (other, _) = (ca.issue(authority, CLIENT, QUARTER) for _ in range(2))
    assert isinstance(key.curve, ec.SECP256R1)
    assert key.public_key() == leaf.public_key()
    assert leaf.serial_number != other.serial_number
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    link = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert link.key_identifier == issuer.digest


def test_not_beyond_the_authority(authority: ca.Authority) -> None:
    """A leaf cannot end after its authority; the error has the number of days left."""
    with pytest.raises(ValueError, match="at most 3,650 days, got 3651"):
        ca.issue(authority, CLIENT, ca.Validity(NOW, 3651))


@pytest.mark.parametrize("name", ["", "..", "-x", "a/b", "a b", "é", "x" * 65])
def test_names(name: str) -> None:
    """Names that are no ids are refused: they become file names and URIs."""
    with pytest.raises(ValueError, match="client name"):
        ca.Identity("client", name)


@pytest.mark.parametrize(("role", "hosts"), [("server", ()), ("client", ("localhost",)), ("owner", ())])
def test_identities(role: str, hosts: tuple[str, ...]) -> None:
    """There are three roles, and hosts belong to servers only."""
    with pytest.raises(ValueError, match="expected"):
        ca.Identity(role, "x", hosts)


@pytest.mark.parametrize("host", ["a b", "", "http://x", "a..b", "bücher.example"])
def test_hosts(authority: ca.Authority, host: str) -> None:
    """A host that is neither a DNS name nor an address is refused."""
    with pytest.raises(ValueError, match="DNS name or an IP address"):
        ca.issue(authority, ca.Identity("server", "x", (host,)), QUARTER)


def test_files_round_trip(authority: ca.Authority) -> None:
    """An authority is the same after its PEM files were read back."""
    again = ca.load_authority(ca.certificate_pem(authority.certificate), ca.key_pem(authority.key))
    assert again.certificate == authority.certificate
    assert again.key.private_numbers() == authority.key.private_numbers()


def test_leaf_is_no_authority(authority: ca.Authority) -> None:
    """A leaf's files are refused as an authority's, and a key that is not the certificate's as well."""
    leaf, key = ca.issue(authority, CLIENT, QUARTER)
    with pytest.raises(ValueError, match="expected an authority's certificate"):
        ca.load_authority(ca.certificate_pem(leaf), ca.key_pem(key))
    with pytest.raises(ValueError, match="own private key"):
        ca.load_authority(ca.certificate_pem(leaf), ca.key_pem(authority.key))
