"""The service for devices without a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fl_server.errors import TooMany
from fl_server.metrics import Metrics
from fl_server.rpc.enrollment.devices import EnrollmentService
from fl_server.security_config import EnrollmentConfig
from protos.fl.v1 import enrollment_pb2 as pb


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
