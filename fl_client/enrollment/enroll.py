"""Gets a certificate for a token: the authority by its fingerprint, the key on the disk, the call, the files.

The same call after a crash gets the same certificate, because key and request are kept until `end_pending`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cryptography import x509

from fl_client.enrollment.authority_pin import find_authority, fingerprint_of
from fl_client.enrollment.folder import CertificateFolder
from fl_client.enrollment.requests import Issued, KeyRequest, checked
from fl_client.errors import FailedCall, NotAllowed, Refused, TransportError, Unreachable, UsageError
from fl_common.certificates.names import NoHolder, holder_of
from fl_common.certificates.pem import invalid_now
from fl_common.proxies import proxy_for
from protos.fl.v1.enrollment_pb2 import EnrollRequest, IssuedCertificate

if TYPE_CHECKING:
    from fl_client.connection.enrollment_calls import EnrollmentCalls

TRIES = 5
"""Calls at most, while the coordinator asks for a later call."""
LONGEST_WAIT_S = 60.0
SOON_S = 5.0
"""A certificate that begins in so many seconds is waited for."""


@dataclass(frozen=True)
class Enrollment:
    """Where and with what a device enrolls."""

    address: str
    """host:port of the coordinator's port for enrollment."""
    token: str = field(repr=False)
    fingerprint: str | None
    """Of the coordinator's authority; None: `authority` is known."""
    authority: bytes = b""
    """PEM of the trusted authority."""
    name: str = ""
    """The requested client id; empty: the token's."""
    use_proxy: bool = True
    """Connect through the proxy of the environment."""

    def into(self, folder: CertificateFolder) -> Issued:
        """Get the certificate and put it in use. Raises UsageError, which names the cause and what to do."""
        # Imported here, so that `fl-client --help` is quick.
        from fl_client.connection.enrollment_calls import GrpcEnrollment  # noqa: PLC0415

        proxy, pin = proxy_for(self.address, self.use_proxy), self.fingerprint
        authority = self.authority if pin is None else find_authority(self.address, pin, proxy)
        try:
            issued = self._issued(GrpcEnrollment(self.address, authority, proxy), folder)
            self._check(issued, folder)
            folder.install(issued)
        except OSError as error:
            raise UsageError(
                f"{folder.path} cannot be written: {error.strerror or error}; use sudo, or another --state-dir"
            ) from None
        except FailedCall as error:
            raise UsageError(f"the coordinator at {self.address} failed: {error}; its log has the cause") from None
        except Unreachable as error:
            raise UsageError(f"no answer from {self.address}: {error}; the same command may be repeated") from None
        except (NotAllowed, Refused) as error:
            raise UsageError(f"the coordinator refused the enrollment: {error}; {_REFUSED}") from None
        except TransportError as error:
            raise UsageError(f"{self.address}: {error}") from None
        return issued

    def _issued(self, calls: EnrollmentCalls, folder: CertificateFolder) -> Issued:
        """The answer for the pending key. A refused key of a certificate, which may be revoked, is replaced once."""
        request, reused = folder.pending(), folder.reuses_key()
        try:
            answer = asyncio.run(self._call(calls, request))
        except (NotAllowed, Refused):
            if not reused:
                raise
            request = folder.begin_again()
            answer = asyncio.run(self._call(calls, request))
        return checked(answer, request.key, self.name)

    async def _call(self, calls: EnrollmentCalls, request: KeyRequest) -> IssuedCertificate:
        """The answer. Where the coordinator asks for a later call, the call is repeated."""
        message = EnrollRequest(token=self.token, csr=request.csr, name=self.name)
        for _ in range(TRIES - 1):
            try:
                return await calls.enroll(message)
            except Unreachable as error:
                if error.wait is None:
                    raise
                await asyncio.sleep(min(max(error.wait, 0.0), LONGEST_WAIT_S))
        return await calls.enroll(message)

    def _check(self, issued: Issued, folder: CertificateFolder) -> None:
        """Raises UsageError for the certificate of another device, or of a coordinator that is not the pinned one."""
        leaf = x509.load_pem_x509_certificate(issued.cert)
        early_s = leaf.not_valid_before_utc.timestamp() - time.time()
        if 0 < early_s <= SOON_S:  # after a revocation a name's next certificate begins a moment later
            time.sleep(early_s)
        if invalid := invalid_now(leaf, datetime.now(UTC)):
            raise UsageError(
                f"the new certificate {invalid}: set the clock of this device (timedatectl), then repeat the command"
            )
        authorities = x509.load_pem_x509_certificates(issued.ca)
        if self.fingerprint is not None and self.fingerprint not in map(fingerprint_of, authorities):
            raise UsageError(
                f"expected the authority with the fingerprint {self.fingerprint} in the coordinator's answer, got"
                f" {', '.join(map(fingerprint_of, authorities))}: the coordinator's settings are wrong"
            )
        if (before := name_in(folder)) is not None and before != issued.name:
            raise UsageError(
                f"expected a token for {before!r}, whose files are in {folder.path.parent}, got one for"
                f" {issued.name!r}: use that device's token, or another --state-dir"
            )


def name_in(folder: CertificateFolder) -> str | None:
    """The client id of the certificate in use. None if there is none."""
    leaf = folder.certificate()
    try:
        return None if leaf is None else holder_of(leaf).name
    except NoHolder:
        return None


_REFUSED = "a token has one use and a time limit; the operator makes a new one: `fl enroll create --name NAME`"
