"""Certificates that have ended, or are not valid yet: what the daemon's owner reads, and what the daemon does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from fl_client import app
from fl_client.connection import certificates
from fl_client.connection.certificates import Certificates
from fl_client.connection.link import RetryDelays
from fl_client.connection.reconnect import ReconnectPolicy
from fl_client.connection.transport import GrpcTransport
from fl_client.errors import InvalidCertificate, TransportError, Unreachable
from fl_client.monitoring.metrics import Metrics
from fl_client.settings.config import TlsConfig
from fl_ops.certificates import ca
from tests.fl_client.fake_coordinator import FakeCoordinator
from tests.fl_client.fleet import Fleet

NOW = datetime.now(UTC).replace(hour=12)
AUTHORITY = ca.make_authority("Test CA", ca.Validity(NOW - timedelta(days=400), 3650))
CLOSED = Unreachable("the server closes the connection")


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """The logged lines."""
    with capture_logs() as lines:
        yield lines


def files(folder: Path, begins: float, days: int) -> TlsConfig:
    """The files of edge-1, valid for some days. begins: days from now."""
    validity = ca.Validity(NOW + timedelta(days=begins), days)
    certificate, key = ca.issue(AUTHORITY, ca.Identity("client", "edge-1"), validity)
    tls = TlsConfig(ca=folder / "ca.crt", cert=folder / "tls.crt", key=folder / "tls.key")
    tls.ca.write_bytes(ca.certificate_pem(AUTHORITY.certificate))
    tls.cert.write_bytes(ca.certificate_pem(certificate))
    tls.key.touch(0o600)
    tls.key.write_bytes(ca.key_pem(key))
    return tls


def of(tls: TlsConfig) -> Certificates:
    """The daemon's reader of these files, which checks them often."""
    return Certificates(tls, "edge-1", Metrics(), RetryDelays(certificate_check=0.01))


def test_an_ended_certificate_explains_a_closed_connection(tmp_path: Path) -> None:
    """The error has the file, its end, the transport's own words, and the command that renews it."""
    ended = NOW - timedelta(days=3)
    error = of(files(tmp_path, -10, 7)).explained(CLOSED)
    assert isinstance(error, InvalidCertificate)
    assert str(error) == (
        f"this device's certificate {tmp_path}/tls.crt ended on {ended:%Y-%m-%d %H:%M} UTC"
        " (the server closes the connection)"
    )
    assert "`fl ca renew client-edge-1`" in error.todo
    assert error.ended


def test_a_certificate_that_is_not_valid_yet_points_to_the_clock(tmp_path: Path) -> None:
    """The error has the date, and the daemon's waits stay short, because a clock is set at any time."""
    error = of(files(tmp_path, 5, 7)).explained(CLOSED)
    assert isinstance(error, InvalidCertificate)
    assert f"is not valid before {NOW + timedelta(days=5):%Y-%m-%d}" in str(error)
    assert "timedatectl" in error.todo
    policy = ReconnectPolicy(RetryDelays(first=1, longest=15, blocked=60))
    assert max(policy.after(error, 0.0, was_registered=False) for _ in range(10)) <= 15


def test_a_valid_certificate_explains_nothing(tmp_path: Path) -> None:
    """The error stays as it is."""
    assert of(files(tmp_path, -1, 7)).explained(CLOSED) is CLOSED


def test_waits_after_an_ended_certificate_are_long(tmp_path: Path, logs: list[EventDict]) -> None:
    """Only a person can help: each wait is at least half a minute, and the log has the cause and the remedy."""
    error = of(files(tmp_path, -10, 7)).explained(CLOSED)
    policy = ReconnectPolicy(RetryDelays())
    assert min(policy.after(error, 0.0, was_registered=False) for _ in range(5)) >= 30
    line = next(line for line in logs if line["event"] == "certificate_invalid")
    assert "ended on" in line["reason"]
    assert "fl ca renew" in line["todo"]


def test_the_end_is_announced_each_day_with_the_remedy(
    tmp_path: Path, logs: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate with a tenth of its time left is logged at the start, and again when a day has passed."""
    read = of(files(tmp_path, -90, 100))
    read.current()
    monkeypatch.setattr(certificates, "WARN_AGAIN_S", 0.0)
    read.current()
    lines = [line for line in logs if line["event"] == "certificate_ends_soon"]
    assert len(lines) == 2
    assert all("`fl ca renew client-edge-1`" in line["todo"] for line in lines)


def test_an_end_that_has_passed_is_not_announced_as_soon(tmp_path: Path, logs: list[EventDict]) -> None:
    """The warning of an ended certificate has its own name, and is given once a day too."""
    read = of(files(tmp_path, -10, 7))
    read.current()
    read.current()
    assert [line["event"] for line in logs] == ["certificate_ended"]


async def test_a_renewed_certificate_ends_the_wait(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    """After an ended certificate the daemon would wait an hour. It connects when the files are renewed."""
    renewal, renewals = asyncio.Event(), []
    fleet.delays = RetryDelays(first=0.01, longest=0.05, blocked=3600)

    class Ended(app.DaemonEndpoint):
        def explained(self, error: TransportError) -> TransportError:
            return InvalidCertificate(f"ended ({error})", "renew it", ended=True)

        async def renewed(self) -> None:
            await renewal.wait()
            renewal.clear()
            renewals.append(True)

        def connect(self) -> GrpcTransport:
            return GrpcTransport(f"127.0.0.1:{coordinator.port if renewals else 1}")

    monkeypatch.setattr(app, "DaemonEndpoint", Ended)
    async with fleet.daemon() as daemon:
        await daemon.until(lambda: any(line["event"] == "disconnected" for line in logs))
        renewal.set()
        await coordinator.until_called("Attend")
    waits = [line["next_try_seconds"] for line in logs if line["event"] == "disconnected"]
    assert len(waits) == 1
    assert waits[0] >= 1800
