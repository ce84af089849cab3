"""Cost of the audit log: admin calls a second of a real coordinator, and rows a second alone.

    python -m benchmarks.security.audit_rows [--calls 1000]

A coordinator with a ledger in SQLite on this disk, gRPC on loopback without TLS, one operator with 1 and 8 calls at
once. `--no-audit` leaves the recording of calls out, for comparison. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio

from fl_server.audit.log import AuditRecord
from fl_server.rpc.health import Health
from fl_server.rpc.interceptors import AuditedMethod
from fl_server.rpc.ports import allow_open_files
from fl_server.server import Server
from fl_server.settings.config import ServerConfig
from protos.fl.v1 import admin_pb2, admin_pb2_grpc


async def rates(call: Callable[[int], Awaitable[object]], calls: int, at_once: int) -> dict[str, float]:
    """Calls a second, and processor time of a call with its client. call: makes the call with this number."""
    numbers = iter(range(calls))

    async def work() -> None:
        for number in numbers:
            await call(number)

    began, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(at_once)))
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    return {"per_s": round(calls / seconds, 1), "cpu_ms": round(1000 * busy / calls, 3)}


async def measure(folder: Path, calls: int) -> dict[str, Any]:
    """All numbers of one coordinator."""
    config = ServerConfig(state_dir=folder, insecure=True, listen="127.0.0.1:0", admin_listen="127.0.0.1:0",
                          metrics_listen=None)  # fmt: skip
    server = Server(config, Health(()), allow_open_files(config.limits.max_clients, config.connections))
    await server.start()
    found: dict[str, Any] = {}
    addresses, audit = server._listeners.addresses, server._services.audit  # noqa: SLF001 - the parts of a real coordinator
    try:
        async with grpc.aio.insecure_channel(addresses["admin_listen"]) as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)

            async def ban(number: int) -> None:
                await stub.BanClient(admin_pb2.BanClientRequest(client_id=f"edge-{number}", reason="benchmark"))

            async def read(_: int) -> None:
                await stub.ListRuns(admin_pb2.ListRunsRequest(page_size=1))

            for at_once in (1, 8):
                found[f"bans_{at_once}_at_once"] = await rates(ban, calls, at_once)
                found[f"reads_{at_once}_at_once"] = await rates(read, calls, at_once)
        record = AuditRecord("operator:alice", "127.0.0.1:1", "Test", "edge-1", "ok", "benchmark")
        found["durable_rows_1_at_once"] = await rates(lambda _: audit.add(record), calls, 1)
        found["durable_rows_100_at_once"] = await rates(lambda _: audit.add(record), 10 * calls, 100)
    finally:
        await server.stop()
    return found


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--no-audit", action="store_true")
    given = parser.parse_args()
    if given.no_audit:
        AuditedMethod.recording = lambda self, inner, *, streams: inner  # type: ignore[method-assign]  # for comparison
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), given.calls)), indent=2))


if __name__ == "__main__":
    main()
