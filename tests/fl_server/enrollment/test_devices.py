"""The services for devices: each result is counted and recorded, and refusals count against their address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry

from fl_server import identity
from fl_server.audit.log import AuditRecord
from fl_server.enrollment.calls import CertificatesService, EnrollmentService
from fl_server.errors import Forbidden, InvalidInput, LimitExceeded, NotConfigured, NotEnrolled, TooMany
from fl_server.metrics import Metrics
from fl_server.settings.sections import EnrollmentConfig
from protos.fl.v1 import enrollment_pb2 as pb
from tests.fl_server.enrollment.site import Site, holder
from tests.processes.enrollment import csr_of, new_key


class Recorded:
    """The rows of an audit log."""

    def __init__(self) -> None:
        self.rows: list[AuditRecord] = []

    async def record_in_time(self, record: AuditRecord) -> None:
        self.rows.append(record)


class Services:
    """Both services, with their metrics and rows."""

    def __init__(self, folder: Path) -> None:
        limits = {"address_failures_per_min": 4.0, "renewals_per_min": 2.0, "lifetime_s": 30.0}
        self.site, self.metrics, self.audit = Site(folder, limits), Metrics(CollectorRegistry()), Recorded()
        audit: Any = self.audit
        self.enrollment = EnrollmentService(self.site.issuer, self.metrics, audit)
        self.certificates = CertificatesService(self.site.issuer, self.metrics, audit)

    async def enroll(self, token: str, csr: bytes | None = None) -> pb.IssuedCertificate:
        """The answer to a device."""
        request = pb.EnrollRequest(token=token, csr=csr or csr_of(new_key()))
        context: Any = None
        return (await self.enrollment.Enroll(request, context)).issued

    async def renew(self) -> pb.IssuedCertificate:
        """The answer to the current caller."""
        context: Any = None
        return (await self.certificates.Renew(pb.RenewRequest(csr=csr_of(new_key())), context)).issued

    def counted(self) -> dict[str, float]:
        """Requests for a certificate by result, without zeros."""
        samples = self.metrics.registry.collect()
        found = [each for family in samples for each in family.samples if each.name == "fl_enrollments_total"]
        return {each.labels["result"]: each.value for each in found if each.value}


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    """The services, for a caller at 192.0.2.7."""
    identity.address.set("192.0.2.7:5000")
    services = Services(tmp_path)
    yield services
    services.site.close()


async def test_an_answer_has_all_that_a_device_needs(services: Services) -> None:
    """The certificate, the coordinator's authority, the labels, and the time of the renewal."""
    issued = await services.enroll(await services.site.token("edge-7", labels={"site": "north"}))
    leaf = x509.load_pem_x509_certificate(issued.chain)
    assert (issued.name, dict(issued.labels)) == ("edge-7", {"site": "north"})
    assert issued.authority == services.site.pki.ca.read_bytes()
    assert issued.not_after.seconds == leaf.not_valid_after_utc.timestamp()
    assert 18 <= issued.not_after.seconds - issued.renew_after.seconds + 10 <= 22
    row = services.audit.rows[0]
    assert (row.method, row.subject, row.result, row.address) == ("Enroll", "edge-7", "ok", "192.0.2.7:5000")


async def test_each_result_is_counted(services: Services) -> None:
    """An address with many refusals is refused before its token is looked at, also one that is right."""
    key, token = new_key(), await services.site.token("edge-7")
    for _ in range(2):
        await services.enroll(token, csr_of(key))
    with pytest.raises(NotEnrolled):
        await services.enroll(token)
    with pytest.raises(InvalidInput):
        await services.enroll(await services.site.token("edge-8"), b"x")
    services.site.banned.add("edge-9")
    with pytest.raises(Forbidden):
        await services.enroll(await services.site.token("edge-9"))
    for _ in range(2):
        with pytest.raises(NotEnrolled):
            await services.enroll("guess")
    with pytest.raises(TooMany):
        await services.enroll(await services.site.token("edge-6"))
    expected = {"issued": 1, "repeated": 1, "used": 1, "csr": 1, "banned": 1, "token": 2, "limited": 1}
    assert services.counted() == expected
    assert [row.detail.endswith("issued before") for row in services.audit.rows] == [False, True]
    issued = services.metrics.registry.get_sample_value("fl_certificates_issued_total", {"why": "enrolled"})
    assert issued == 1


async def test_renewals_of_a_client_have_a_rate(services: Services) -> None:
    """Another client is not affected; without a certificate there is no renewal."""
    for name in ("edge-7", "edge-8"):
        identity.caller.set(holder(name))
        for _ in range(2):
            assert (await services.renew()).name == name
        with pytest.raises(LimitExceeded, match="2 renewals a minute"):
            await services.renew()
    identity.caller.set(identity.ANYBODY)
    with pytest.raises(Forbidden, match="a client's certificate"):
        await services.renew()
    assert {(row.actor, row.method) for row in services.audit.rows} == {
        ("client:edge-7", "Renew"), ("client:edge-8", "Renew"),
    }  # fmt: skip


async def test_without_an_authority_nothing_is_renewed(services: Services) -> None:
    """The message has the setting."""
    identity.caller.set(holder())
    audit: Any = services.audit
    services.certificates = CertificatesService(None, services.metrics, audit)
    with pytest.raises(NotConfigured, match=r"set \[enrollment\] in its server.toml"):
        await services.renew()


class CountingIssuer:
    """Counts requests that get as far as the issuer."""

    def __init__(self) -> None:
        self.config = EnrollmentConfig(ca_cert=Path("ca.crt"), ca_key=Path("ca.key"), requests_per_s=1e-6)
        self.calls = 0

    def enroll(self, *_: object) -> None:
        self.calls += 1
        raise AssertionError("expected no call")

    reenroll = enroll


async def test_a_request_over_the_rate_limit_does_not_reach_the_issuer() -> None:
    """Neither kind is begun, so nothing is left that was never awaited."""
    issuer: Any = CountingIssuer()
    audit: Any = None
    service = EnrollmentService(issuer, Metrics(CollectorRegistry()), audit)
    service._rates.wait("192.0.2.1:1", 0.0)  # the first one comes at once
    context: Any = None
    with pytest.raises(TooMany):
        await service.Enroll(pb.EnrollRequest(token="x"), context)
    with pytest.raises(TooMany):
        await service.Reenroll(pb.ReenrollRequest(csr=b"x"), context)
    assert issuer.calls == 0
