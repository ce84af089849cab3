"""The enrollment of many devices in one go.

    python -m benchmarks.security.enrollment --devices 1000 --processes 2

Each device makes its key, opens a TLS connection of its own to `enroll_listen`, sends its token and its request, and
gets its certificate. A device that is asked to wait calls again. Measures seconds until the last device has its
certificate, how long a device took, the coordinator's processor time for each, and its event loop's lag during it; then
the same for renewals over mTLS, one for each device. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.crowds.processes import crowds, raise_file_limit
from benchmarks.deployment import TIMEOUT_S, Deployment, Server, cpu_s
from benchmarks.processes import Processes
from protos.fl.v1 import admin_pb2, enrollment_pb2_grpc
from protos.fl.v1 import enrollment_pb2 as pb
from protos.fl.v1.errors_pb2 import RetryLater
from protos.status import detail_of

_MOST_TOKENS = 1000
"""The most tokens of one call."""
_AGAIN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True)
class Crowd:
    """Devices of one process."""

    enrollment: str
    listen: str
    root: bytes
    tokens: tuple[str, ...]


@dataclass
class Device:
    """A device, and what was measured of its last call."""

    token: str
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    chain: bytes = b""
    seconds: float = 0.0
    refused: int = 0

    @property
    def csr(self) -> bytes:
        """The request for its key."""
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.DER)

    async def enroll(self, crowd: Crowd) -> None:
        """Get the first certificate."""
        credentials = grpc.ssl_channel_credentials(crowd.root)
        async with grpc.aio.secure_channel(crowd.enrollment, credentials, _OWN_CONNECTION) as channel:
            stub: Any = enrollment_pb2_grpc.EnrollmentStub(channel)
            request = pb.EnrollRequest(token=self.token, csr=self.csr)
            self.chain = (await self._called(lambda: stub.Enroll(request, timeout=TIMEOUT_S))).issued.chain

    async def renew(self, crowd: Crowd) -> None:
        """Get another certificate for this one."""
        pem = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        credentials = grpc.ssl_channel_credentials(crowd.root, pem, self.chain)
        async with grpc.aio.secure_channel(crowd.listen, credentials, _OWN_CONNECTION) as channel:
            stub: Any = enrollment_pb2_grpc.CertificatesStub(channel)
            request = pb.RenewRequest(csr=self.csr)
            await self._called(lambda: stub.Renew(request, timeout=TIMEOUT_S))

    async def _called(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The response; a refused call is repeated after the time that the coordinator names."""
        began, self.refused = time.monotonic(), 0
        while True:
            try:
                response = await call()
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AGAIN:
                    raise
                self.refused += 1
                detail = detail_of(error.trailing_metadata())
                later = isinstance(detail, RetryLater)
                await asyncio.sleep(detail.wait.ToTimedelta().total_seconds() if later else 0.5)  # type: ignore[union-attr]  # of a RetryLater
            else:
                self.seconds = time.monotonic() - began
                return response


def live(pipe: Pipe, crowd: Crowd) -> None:
    """Enroll when asked to, then renew when asked to; answers with seconds and refusals of each device."""
    devices = [Device(token) for token in crowd.tokens]

    async def all_of(steps: Sequence[Awaitable[None]]) -> None:
        await asyncio.gather(*steps)

    for step in (Device.enroll, Device.renew):
        pipe.recv()
        asyncio.run(all_of([step(device, crowd) for device in devices]))
        pipe.send([(device.seconds, device.refused) for device in devices])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The enrollment of many devices in one go.")
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="number of processes for the devices")
    case = parser.parse_args(arguments)
    raise_file_limit(case.devices + 500)
    with tempfile.TemporaryDirectory(prefix="enrollment-") as folder, Processes(Path(folder)) as processes:
        print(json.dumps(measure(case, Deployment(Path(folder), processes, tls=True))))


def measure(case: argparse.Namespace, deployment: Deployment) -> dict[str, Any]:
    """Make the tokens, enroll, renew."""
    first, section = deployment.enrollment()
    server = deployment.serve(extra=section, first=first)
    root = (deployment.folder / "ca.pem").read_bytes()
    began = time.monotonic()
    tokens = _tokens(server, case.devices)
    found: dict[str, Any] = {"devices": case.devices, "tokens_s": round(time.monotonic() - began, 2)}
    groups = [tuple(tokens[index :: case.processes]) for index in range(case.processes)]
    crowd = [Crowd(server.enrollment, server.address, root, group) for group in groups]
    with crowds(live, crowd) as pipes:
        for step in ("enroll", "renew"):
            found[step] = _step(server, pipes)
    return found


def _step(server: Server, pipes: Sequence[Pipe]) -> dict[str, Any]:
    """All devices at once."""
    cpu, began, before = cpu_s(server.child), time.monotonic(), _lag(server)
    for pipe in pipes:
        pipe.send(())
    devices = sorted(device for pipe in pipes for device in pipe.recv())
    seconds, count = time.monotonic() - began, len(devices)
    return {
        "all_s": round(seconds, 2),
        "median_s": round(devices[count // 2][0], 2),
        "slowest_s": round(devices[-1][0], 2),
        "refused_calls": sum(refused for _, refused in devices),
        "server_cpu_ms_a_device": round((cpu_s(server.child) - cpu) * 1000 / count, 2),
        "loop_lag_p99_ms": round(_p99(before, _lag(server)) * 1000),
    }


def _tokens(server: Server, count: int) -> list[str]:
    names = [admin_pb2.EnrollmentSpec(name=f"edge-{number}") for number in range(count)]
    with server.operator() as admin:
        calls = [
            admin.call(
                admin_pb2.CreateEnrollmentsRequest(specs=names[at : at + _MOST_TOKENS]),
                admin_pb2.CreateEnrollmentsResponse,
            )
            for at in range(0, count, _MOST_TOKENS)
        ]
    return [created.token for answer in calls for created in answer.created]


def _lag(server: Server) -> dict[float, float]:
    """Counts of the event loop's lags up to each bound."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    found = [sample for sample in samples if sample.name == "fl_event_loop_lag_seconds_bucket"]
    return {float(bucket.labels["le"]): bucket.value for bucket in found}


def _p99(before: dict[float, float], after: dict[float, float]) -> float:
    """The bound below which 99 of 100 lags between two readings are."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    return min(bound for bound, count in counts.items() if count >= 0.99 * max(counts.values()))


if __name__ == "__main__":
    main()
