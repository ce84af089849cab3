"""Failed connections to real sockets: each case has its own explanation, in TLS and in plain text."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography import x509

from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Certificates, Connection
from fl_ops.certificates import ca
from fl_ops.errors import Unreachable
from tests.processes.certificates import Pki
from tests.processes.closing_port import closing_port

NOW = datetime.now(UTC)
WEEK = ca.Validity(NOW - timedelta(hours=1), 7)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """The coordinator's authority."""
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Another authority."""
    return Pki(tmp_path_factory.mktemp("strangers"), "Strangers")


@contextmanager
def coordinator(pki: Pki, host: str = "127.0.0.1", validity: ca.Validity = WEEK) -> Iterator[str]:
    """The address of a port with TLS, which requires certificates of its authority."""
    certificate, key = ca.issue(pki.authority, ca.Identity("server", "coordinator", (host,)), validity)
    pair = ca.key_pem(key), ca.certificate_pem(certificate)
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        credentials = grpc.ssl_server_credentials([pair], pki.ca.read_bytes(), require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def failure(server: str, certificates: Certificates | None) -> str:
    """The error of a call."""
    with AdminClient(Connection(server, certificates)) as admin, pytest.raises(Unreachable) as caught:
        admin.runs.list_runs()
    return str(caught.value)


def trusting(certificates: Certificates, authority: Pki) -> Certificates:
    """The same pair with this authority for the coordinator."""
    return Certificates(authority.ca, certificates.cert, certificates.key)


def test_a_certificate_of_another_authority(pki: Pki, strangers: Pki) -> None:
    """The coordinator answers and refuses: both authorities are named."""
    foreign = trusting(strangers.issue("admin", "eve"), pki)
    with coordinator(pki) as server:
        error = failure(server, foreign)
    assert error.startswith(
        f"the coordinator at {server} refused the certificate {foreign.cert}, issued by 'CN=Strangers'"
    )
    assert "the coordinator's own certificate is from 'CN=Tests' (--ca), another authority" in error
    assert "`fl ca issue admin NAME` makes one" in error
    assert "no coordinator answers" not in error


def test_a_certificate_that_is_refused_by_its_date(pki: Pki) -> None:
    """Of the right authority, not valid yet by the coordinator's clock: the error has its date and no other reason."""
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier("fl://admin/alice")]
    later = pki.forge("later", names, starts=NOW + timedelta(days=1))
    with coordinator(pki) as server:
        error = failure(server, later)
    assert "refused the certificate" in error
    assert "valid by its clock" in error
    assert "another authority" not in error


def test_a_connection_that_is_closed_in_the_handshake(pki: Pki) -> None:
    """No certificate was checked: the error does not mention one of the coordinator."""
    with closing_port() as server:
        error = failure(server, pki.issue("admin", "alice"))
    assert f"the connection to {server} was closed in the TLS handshake, before a certificate was checked" in error
    assert "start the port-forward again" in error
    assert "refused" not in error


@pytest.mark.parametrize(
    ("host", "validity", "expected"),
    [
        ("127.0.0.1", ca.Validity(NOW - timedelta(days=9), 7), "or that of its authority, has expired: `fl ca renew`"),
        ("127.0.0.1", ca.Validity(NOW + timedelta(days=2), 7), "is not valid yet: check the clock"),
        ("coordinator.example", WEEK, "is for other host names: give one of its names with --server"),
    ],
    ids=["expired", "not-yet", "host"],
)
def test_a_certificate_of_the_coordinator_that_is_not_valid(
    pki: Pki, host: str, validity: ca.Validity, expected: str
) -> None:
    """The reason is named."""
    with coordinator(pki, host, validity) as server:
        assert expected in failure(server, pki.issue("admin", "alice"))


def test_a_coordinator_of_another_authority(pki: Pki, strangers: Pki) -> None:
    """The operator's --ca did not sign the coordinator's certificate: the file is named."""
    with coordinator(pki) as server:
        error = failure(server, trusting(pki.issue("admin", "alice"), strangers))
    assert f"is not signed by the authority in --ca {strangers.ca}" in error


def test_plain_text_and_tls(pki: Pki) -> None:
    """Plain text to a port with TLS, and TLS to a port in plain text."""
    with coordinator(pki) as server:
        assert "a coordinator with TLS needs your certificates (--ca, --cert, --key)" in failure(server, None)
    with ThreadPoolExecutor(1) as threads:
        plain = grpc.server(threads)
        server = f"127.0.0.1:{plain.add_insecure_port('127.0.0.1:0')}"
        plain.start()
        assert "uses plain text, which accepts no certificates" in failure(server, pki.issue("admin", "alice"))
        plain.stop(None).wait()


def test_nobody_listens(pki: Pki) -> None:
    """The remedy is a coordinator, not a certificate."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        error = failure(f"127.0.0.1:{bound.getsockname()[1]}", pki.issue("admin", "alice"))
    assert "where no program listens: start one with `fl-server --config server.toml`" in error
