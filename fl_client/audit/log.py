"""Writes the device's audit log beside the daemon's work, which never waits for it.

A thread of its own writes the rows within milliseconds. A full disk stops no training: rows wait in memory, further
ones are counted, and a row has their number when the disk has room again. Rows above a rate are counted too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from cryptography import x509
from prometheus_client import Counter

from fl_client.audit.file import AuditFile, Entry
from fl_client.storage.pending_updates import key_of
from fl_common.certificates.pem import fingerprints
from fl_common.rate_limits import RateLimiter
from fl_common.units import counted
from protos.fl.v1 import coordinator_pb2, training_pb2

log = structlog.get_logger()

MOST_WAITING = 1000
"""Rows in memory while the disk is full."""
ROWS_PER_S, ROW_BURST = 10.0, 1000
"""Limit of rows: a hostile coordinator must not push older rows out of the files quickly."""
LEFT_OUT = "audit_rows_left_out"
"""Method of the row that has the number of the others."""
CLOSE_S = 1.0


class DeviceAudit:
    """The daemon's audit log. `note` is called on the event loop."""

    def __init__(self, folder: Path, counter: Counter, server: str, clock: Callable[[], float] = time.time) -> None:
        """counter: by its label, of rows that were "written" or "left_out". server: address of the coordinator."""
        self._file, self._counter, self._server, self._clock = AuditFile(folder), counter, server, clock
        self.coordinator = "coordinator"
        """Who asks: with its id once this device has registered."""
        self.certificate = b""
        """The certificate of this device that the newest row about one has, in PEM."""
        self._waiting: deque[Entry] = deque()
        self._rate = RateLimiter(ROWS_PER_S, ROW_BURST)
        self._left_out = 0
        self._failed = False
        self._thread = ThreadPoolExecutor(1, "audit")

    def note(self, method: str, subject: str = "", result: str = "ok", detail: str = "") -> None:
        """Add a row. It is written soon, in order."""
        fields = {"method": method, "subject": subject, "result": result, "detail": detail}
        fields |= {"actor": self.coordinator, "address": self._server}
        if len(self._waiting) >= MOST_WAITING or not self._rate.try_acquire():
            self._left_out += 1
            self._counter.labels("left_out").inc()
            return
        self._waiting.append(Entry(int(self._clock() * 1e6), fields))
        try:
            self._thread.submit(self._write)
        except RuntimeError:  # the daemon stops
            log.warning("audit_not_written", row=fields)

    async def close(self) -> None:
        """Write what waits. A disk that hangs is not waited for."""
        self._thread.submit(self._write)
        closing = asyncio.ensure_future(asyncio.to_thread(self._thread.shutdown))
        await asyncio.wait({closing}, timeout=CLOSE_S)

    def _write(self) -> None:
        """Write all rows that wait; in the thread."""
        entries = [self._waiting.popleft() for _ in range(len(self._waiting))]
        left_out, self._left_out = self._left_out, 0
        if left_out:
            fields = {"actor": "daemon", "method": LEFT_OUT, "result": "ok", "detail": str(left_out)}
            entries.append(Entry(int(self._clock() * 1e6), fields))
        if not entries:
            return
        try:
            self._file.append(entries)
        except OSError as error:
            self._waiting.extendleft(reversed(entries[: len(entries) - bool(left_out)]))
            self._left_out += left_out
            if not self._failed:
                log.warning("audit_not_written", error=str(error), waiting=len(entries))
            self._failed = True
        else:
            self._failed = False
            self._counter.labels("written").inc(len(entries))


def subject_of(key: tuple[str, int, int]) -> str:
    """The key of an assignment as the text run/round/exchange."""
    return "/".join(map(str, key))


def note_registered(audit: DeviceAudit, response: coordinator_pb2.RegisterResponse, ca: bytes) -> None:
    """A coordinator accepted this device. ca: the trusted CAs in PEM; empty in plain text."""
    audit.coordinator = f"coordinator:{response.coordinator_id}"
    try:
        prints = ", ".join(fingerprints(ca)) if ca else "none, in plain text"
    except ValueError:
        prints = "unreadable"
    audit.note("registered", response.coordinator_id, detail=f"protocol {response.protocol}, CA {prints}")


def note_certificate(audit: DeviceAudit, pem: bytes) -> None:
    """This device connects with this certificate; one row for each."""
    if pem == audit.certificate:
        return
    audit.certificate = pem
    try:
        leaf = x509.load_pem_x509_certificate(pem)
    except ValueError:
        return  # the connection names the problem
    ends = f"ends {leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
    audit.note("certificate_used", f"{leaf.serial_number:x}", detail=ends)


def note_assigned(audit: DeviceAudit, assignment: training_pb2.Assignment) -> None:
    """The coordinator asked for training."""
    training = assignment.training
    steps, epochs = training.local_steps, training.local_epochs
    amount = counted(steps, "step") if steps else counted(epochs, "epoch")
    detail = (
        f"attempt {assignment.attempt}, task {assignment.task[:100]} {assignment.fingerprint.source[:100]}, "
        f"algorithm {training.algorithm.name[:100]}, {amount}, batches of {training.batch_size}"
    )
    audit.note("assigned", subject_of(key_of(assignment.key)), detail=detail)


def note_evaluation(audit: DeviceAudit, assignment: training_pb2.EvaluationAssignment) -> None:
    """The coordinator asked for an evaluation."""
    detail = f"task {assignment.task[:100]} {assignment.fingerprint.source[:100]}"
    audit.note("evaluation_assigned", subject_of(key_of(assignment.key)), detail=detail)
