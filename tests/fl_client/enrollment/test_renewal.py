"""The renewal in a daemon: at its time, with a new key, again after a failure, and not after a refusal."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from fl_client.connection.certificates import Certificates
from fl_client.connection.link import Link, RetryDelays, Session
from fl_client.connection.transport import GrpcEnrollment, GrpcTransport
from fl_client.enrollment import renewal
from fl_client.enrollment.folder import CertificateFolder, checked, new_request
from fl_client.enrollment.renewal import CertificateRenewal, Means
from fl_client.errors import NotAllowed, TransportError, Unreachable
from fl_client.monitoring.metrics import Metrics
from fl_client.settings.config import TlsConfig
from fl_client.storage.disk import DiskThread
from protos.fl.v1 import enrollment_pb2 as pb
from tests.fl_client.enrollment.fake_authority import FakeAuthority
from tests.processes.certificates import Pki

FAST = RetryDelays(first=0.01, longest=0.05, certificate_check=0.01)


@dataclass
class Coordinator(GrpcEnrollment):
    """Both services without a network: answers from the authority, or the next error."""

    authority: FakeAuthority
    errors: list[TransportError] = field(default_factory=list)
    renewed: list[pb.RenewRequest] = field(default_factory=list)
    reenrolled: list[pb.ReenrollRequest] = field(default_factory=list)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """See Connection."""
        self.renewed.append(request)
        if self.errors:
            raise self.errors.pop(0)
        return pb.RenewResponse(issued=self.authority.issued(request.csr))

    async def reenroll(self, request: pb.ReenrollRequest) -> pb.IssuedCertificate:
        """See GrpcEnrollment."""
        self.reenrolled.append(request)
        if self.errors:
            raise self.errors.pop(0)
        return self.authority.issued(request.csr)


@dataclass
class Device:
    """A device with a certificate, and the parts that its renewal uses."""

    folder: CertificateFolder
    coordinator: Coordinator
    metrics: Metrics = field(default_factory=Metrics)
    link: Link = field(default_factory=lambda: Link(FAST))
    reenrolls: bool = False

    def install(self, **changes: Any) -> None:
        """Get a certificate of the authority with these fields."""
        for name, value in changes.items():
            setattr(self.coordinator.authority, name, value)
        request = new_request()
        self.folder.install(checked(self.coordinator.authority.issued(request.csr), request.key))

    def connect(self, session_id: str = "s1") -> None:
        """Open a session."""
        self.link.open(Session(session_id, cast(GrpcTransport, self.coordinator), 1, 1))

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[Certificates]:
        """Run the renewal, and the reader of the files."""
        tls = TlsConfig.model_validate({**self.folder.files(), "renew": True})
        certificates, disk = Certificates(tls, "edge-7", self.metrics, FAST), DiskThread()
        reenrollment = (lambda _: self.coordinator) if self.reenrolls else None
        means = Means(self.folder, certificates, self.link, disk, self.metrics, reenrollment)
        task = asyncio.create_task(CertificateRenewal(means, FAST).run())
        try:
            yield certificates
        finally:
            task.cancel()
            await asyncio.wait([task])
            await disk.close()

    def count(self, result: str) -> float:
        """Tries with this result."""
        value = self.metrics.registry.get_sample_value("fl_client_certificate_renewals_total", {"result": result})
        return value or 0.0


async def until(true: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device whose certificate is due, with a session. Later certificates live for a day."""
    device = Device(CertificateFolder(tmp_path / "tls"), Coordinator(FakeAuthority(Pki(tmp_path / "pki"))))
    device.install(life=timedelta(hours=1), begins=timedelta(hours=-3))
    (device.folder.current / "renewal.json").unlink()  # then two thirds of four hours decide
    device.coordinator.authority.life = timedelta(hours=24)
    device.coordinator.authority.begins = timedelta(minutes=-5)
    device.connect()
    return device


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """The logged lines."""
    with capture_logs() as lines:
        yield lines


async def test_a_due_certificate_is_renewed_once(device: Device) -> None:
    """With a new key; the files are replaced, and the wait for new files ends at once."""
    before = device.folder.files()["key"].read_bytes()
    async with device.renewing() as certificates:
        certificates.current()
        renewed = asyncio.create_task(certificates.renewed())
        await renewed
        assert certificates.pem.key == device.folder.files()["key"].read_bytes() != before
        assert certificates.pem.leaf.serial_number == device.folder.certificate().serial_number  # type: ignore[union-attr]
        await until(lambda: len(list(device.folder.path.iterdir())) == 2)
    assert (len(device.coordinator.renewed), device.count("renewed")) == (1, 1)


async def test_a_certificate_that_is_not_due_is_kept(device: Device) -> None:
    """No call before the time."""
    device.install()
    async with device.renewing():
        await asyncio.sleep(0.1)
    assert device.coordinator.renewed == []


async def test_a_replaced_certificate_reaches_a_connection_that_was_made_meanwhile(device: Device) -> None:
    """A connection is made with the old files while the new ones arrive: the next wait for new files ends at once."""
    async with device.renewing() as certificates:
        certificates.current()
        await until(lambda: device.count("renewed"))
        async with asyncio.timeout(60):
            await certificates.renewed()


async def test_failures_are_counted_and_logged_once(device: Device, logs: list[EventDict]) -> None:
    """The same reason is one line, however often it comes, and the renewal succeeds in the end."""
    device.coordinator.errors += [Unreachable("cut") for _ in range(5)]
    async with device.renewing():
        await until(lambda: device.count("renewed"))
    assert [line["reason"] for line in logs if line["event"] == "renewal_failed"] == ["cut"]
    assert (device.count("failed"), device.count("renewed")) == (5, 1)


async def test_a_certificate_for_another_key_is_not_used(device: Device, logs: list[EventDict]) -> None:
    """The coordinator answers with a certificate of a key that this device does not have."""
    device.coordinator.authority.instead.append(new_request().csr)
    async with device.renewing():
        await until(lambda: device.count("renewed"))
    (line,) = [line for line in logs if line["event"] == "renewal_failed"]
    assert "got one for another key" in line["reason"]


async def test_a_refused_device_stops_asking_until_it_is_accepted_again(device: Device, logs: list[EventDict]) -> None:
    """One call, one line with what to do. A new session, which a banned client does not get, makes it ask again."""
    device.coordinator.errors.append(NotAllowed("edge-7 is banned"))
    async with device.renewing():
        await until(lambda: device.count("refused"))
        await asyncio.sleep(0.1)
        device.link.close()
        device.connect("s1")
        await asyncio.sleep(0.1)
        assert len(device.coordinator.renewed) == 1
        device.connect("s2")
        await until(lambda: device.count("renewed"))
    (line,) = [line for line in logs if line["event"] == "renewal_refused"]
    assert "banned" in line["reason"]
    assert "operator" in line["todo"]


async def test_an_ended_certificate_gets_a_new_one_by_itself(device: Device) -> None:
    """Without a session, with the expired certificate and a signature of its key."""
    device.link.close()
    device.install(life=timedelta(seconds=-1))
    device.coordinator.authority.life = timedelta(hours=24)
    device.reenrolls = True
    ended = device.folder.files()["cert"].read_bytes()
    async with device.renewing() as certificates:
        await certificates.renewed()
    (request,) = device.coordinator.reenrolled
    assert request.certificate == ended
    assert device.coordinator.renewed == []


async def test_an_ended_certificate_waits_for_its_owner_without_the_address(device: Device) -> None:
    """Without enroll_server nothing is asked; a certificate of `fl-client init --token` is used at once."""
    device.link.close()
    device.install(life=timedelta(seconds=-1))
    async with device.renewing() as certificates:
        await asyncio.sleep(0.1)
        device.install(life=timedelta(hours=24))
        async with asyncio.timeout(60):
            await certificates.renewed()
    assert device.coordinator.reenrolled == []


async def test_a_repeat_after_a_lost_answer_is_for_the_same_key(device: Device) -> None:
    """Also in another process. The coordinator renews an expired certificate again for that key only."""
    device.coordinator.errors += [Unreachable("cut")] * 3
    first = device.folder.next_request()
    async with device.renewing():
        await until(lambda: device.count("renewed") and not (device.folder.path / "next").exists())
    assert {request.csr for request in device.coordinator.renewed} == {first.csr}
    assert device.folder.next_request().key != first.key


async def test_a_refused_ended_certificate_names_the_setting(device: Device, logs: list[EventDict]) -> None:
    """The line suggests no ban, and the device asks again: the operator may allow a longer grace."""
    device.link.close()
    device.install(life=timedelta(seconds=-1))
    device.coordinator.authority.life = timedelta(hours=24)
    device.coordinator.errors += [NotAllowed("a token, or a certificate that expired less than 7 d 0 h ago")] * 2
    device.reenrolls = True
    async with device.renewing() as certificates:
        await certificates.renewed()
    line = next(line for line in logs if line["event"] == "renewal_refused")
    assert "enrollment.expired_grace_s" in line["todo"]
    assert "banned" not in line["todo"]
    assert len(device.coordinator.reenrolled) == 3


async def test_a_wrong_clock_does_not_make_it_ask_without_end(device: Device) -> None:
    """Every certificate seems to be due: the clock is far ahead, or the coordinator's answer is wrong."""
    device.coordinator.authority.due = True
    async with device.renewing():
        await until(lambda: device.count("renewed"))
        await asyncio.sleep(0.2)
    assert len(device.coordinator.renewed) == 1


async def test_files_that_vanish_with_the_state_directory_are_written_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pair is still in memory, and a restart needs it."""
    monkeypatch.setattr(renewal, "CHECK_S", 0.01)
    device.install()
    async with device.renewing() as certificates:
        shutil.rmtree(device.folder.path)
        await until(lambda: device.folder.certificate() is not None)
        assert device.folder.files()["key"].read_bytes() == certificates.pem.key
