"""The services Enrollment and Certificates with a scripted answer, over real TLS, on threads of their own."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from protos.fl.v1 import enrollment_pb2 as pb
from protos.fl.v1 import enrollment_pb2_grpc as services
from tests.processes.certificates import Pki

Fault = tuple[grpc.StatusCode, str]


@dataclass
class FakeAuthority(services.EnrollmentServicer, services.CertificatesServicer):
    """Signs every request for `name`, unless a fault is waiting."""

    pki: Pki
    name: str = "edge-7"
    life: timedelta = timedelta(hours=24)
    begins: timedelta = timedelta(minutes=-5)
    """From now to the begin of the certificates."""
    labels: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    calls: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    answers: list[tuple[pb.EnrollRequest, pb.EnrollResponse]] = field(default_factory=list)
    instead: list[bytes] = field(default_factory=list)
    """Requests that are signed in place of those that come."""
    due: bool = False
    """Whether every certificate is to be renewed at once."""
    authority: bytes = b""
    """PEM in the answers; empty: that of `pki`."""
    port: int = 0

    def issued(self, csr_der: bytes) -> pb.IssuedCertificate:
        """The answer to a request."""
        csr = x509.load_der_x509_csr(self.instead.pop() if self.instead else csr_der)
        now = datetime.now(UTC)
        uri = x509.UniformResourceIdentifier(f"fl://client/{self.name}")
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.name)]))
            .issuer_name(self.pki.authority.certificate.subject)
            .public_key(csr.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + self.begins)
            .not_valid_after(now + self.life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
            .sign(self.pki.authority.key, hashes.SHA256())
        )
        answer = pb.IssuedCertificate(
            chain=certificate.public_bytes(Encoding.PEM),
            authority=self.authority or self.pki.ca.read_bytes(),
            name=self.name,
            labels=self.labels,
        )
        answer.not_after.FromDatetime(now + self.life)
        answer.renew_after.FromDatetime(now + self.life * 2 / 3)
        if self.due:
            answer.renew_after.FromSeconds(1)
        return answer

    def Enroll(self, request: pb.EnrollRequest, context: Any) -> pb.EnrollResponse:
        """A repeat with the same token and request gets the same certificate."""
        self.calls["Enroll"].append(request)
        self._fail(context)
        return self._remembered(request)

    def Reenroll(self, request: pb.ReenrollRequest, context: Any) -> pb.ReenrollResponse:
        """A certificate, without a check of the expired one."""
        self.calls["Reenroll"].append(request)
        self._fail(context)
        return pb.ReenrollResponse(issued=self.issued(request.csr))

    def _remembered(self, request: pb.EnrollRequest) -> pb.EnrollResponse:
        for known, answer in self.answers:
            if (known.token, known.csr) == (request.token, request.csr):
                return answer
        self.answers.append((request, pb.EnrollResponse(issued=self.issued(request.csr))))
        return self.answers[-1][1]

    def _fail(self, context: Any) -> None:
        if self.faults:
            context.abort(*self.faults.pop(0))

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        """Serve with the chain: the server's certificate and the authority's."""
        files = self.pki.issue("server", "coordinator")
        chain = files.cert.read_bytes() + self.pki.ca.read_bytes()
        credentials = grpc.ssl_server_credentials([(files.key.read_bytes(), chain)])
        self._server = grpc.server(ThreadPoolExecutor(4))
        services.add_EnrollmentServicer_to_server(self, self._server)
        self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


def fingerprint(pki: Pki) -> str:
    """SHA-256 of the authority, with colons."""
    return pki.authority.certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
