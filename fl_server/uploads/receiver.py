"""Uploads at the coordinator: whether one may begin, what becomes of it, what it counts. An update counts whole or not.

The header is checked before any tensor bytes are accepted. The bytes are received by `part_receiver`, here or in a
worker. At the end the whole file is checked, moved into the spool and entered in the ledger; only then is it
acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import structlog

from fl_server.admission.client_rules import UpdateRefused
from fl_server.admission.gate import AdmissionGate
from fl_server.admission.masked import MaskedGate
from fl_server.admission.reading import UpdateContent
from fl_server.aggregation.updates import Source
from fl_server.clients.sessions import Transfer
from fl_server.errors import UploadBroken
from fl_server.run.round_statistics import ClientTransfer
from fl_server.run.run import Run
from fl_server.services import Services
from fl_server.store.errors import StoreError, StoreFull
from fl_server.uploads.part_receiver import Decided, Disk, PartReceiver, spool_key
from fl_server.uploads.stream import Requests
from fl_server.uploads.verdicts import Submission, Verdicts
from protos.codec import digest_bytes
from protos.fl.v1.training_pb2 import ExchangeKey, Receipt, UpdateHeader

log = structlog.get_logger()

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class UploadReceiver:
    """The uploads of all runs."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._verdicts = Verdicts(services)
        self.disk = Disk(services.config, services.spool, services.metrics, services.io, services.fleet.transfer_limits)
        self._parts = PartReceiver(self.disk)
        self.in_flight = 0
        """Open streams."""

    async def submit(self, run: Run, header: UpdateHeader, transfer: Transfer, requests: Requests) -> Receipt:
        """Receive one upload behind its header; returns the receipt. Raises the error that ended the transfer."""
        try:
            opened = await self.open(run, header, transfer)
        except Decided as decided:
            return decided.receipt
        with self.counted():
            return await self._parts.receive(opened, requests)

    async def open(self, run: Run, header: UpdateHeader, transfer: Transfer) -> ControlledUpload:
        """An upload whose bytes may come. Raises Decided."""
        submission = Submission(run, header, transfer.client_id)
        if (first := await self._verdicts.repeated(submission)) is not None:
            raise Decided(first)
        try:
            submission.check_wanted()
            gate = run.submissions.gate(transfer.client_id)
            gate.check_header(header)
        except UpdateRefused as refusal:
            raise Decided(await self._verdicts.refuse(submission, refusal)) from None
        return ControlledUpload(self._services, self.disk, self._verdicts, submission, gate, transfer)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count an open upload as long as the block."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def query(self, run: Run, key: ExchangeKey, client: str) -> tuple[Receipt | None, bool]:
        """The receipt of the first verdict on the client's update for the key, and whether bytes of one are of use."""
        if not run.submissions.undecided(key, client):
            receipt = await self._verdicts.receipt(run, key, client)
            if receipt is not None:
                return receipt, False
        return None, run.submissions.refusal_for(key, client) is None

    async def kept_bytes(self, key: ExchangeKey, client: str, digest: bytes) -> int:
        """The offset at which an upload with that digest continues."""
        return await self._services.in_reads(self._services.spool.kept, spool_key(key, client), digest)


class ControlledUpload:
    """One upload, with what the coordinator decides about it; see `OpenUpload`."""

    def __init__(  # noqa: PLR0913, PLR0917 - what one upload consists of
        self,
        services: Services,
        disk: Disk,
        verdicts: Verdicts,
        submission: Submission,
        gate: AdmissionGate | MaskedGate,
        transfer: Transfer,
    ) -> None:
        self._services, self._disk, self._verdicts = services, disk, verdicts
        self.submission, self.gate, self._transfer = submission, gate, transfer
        self._caller = services.fleet.transfer_limits.of(submission.client)
        self._norms: dict[str, float] = {}
        self._shown: ClientTransfer

    @property
    def header(self) -> UpdateHeader:
        """Its header."""
        return self.submission.header

    @property
    def client(self) -> str:
        """Who sends it."""
        return self.submission.client

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """See OpenUpload."""
        with self.under_way():
            return await self._transfer.unless_ended(work)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The transfer of the bytes, for tables and counts. What was sent before is known to be kept by now."""
        header, rounds = self.header, self.submission.run.rounds
        rounds.bytes.upload_started(self.client, header.resume_offset)
        if header.resume_offset:
            self._services.metrics.uploads_resumed.inc()
            write = self.submission.run.context.cohort_log.info
            write("upload_resumed", run=header.key.run_id, client=self.client, offset=header.resume_offset)
        with rounds.transfers.transfer(self.client, "up", header.size_bytes, header.resume_offset) as self._shown:
            yield

    def check(self) -> None:
        """See OpenUpload. The client may be banned by now, or have a newer session."""
        self._services.fleet.sessions.of_call(self.header.session_id)

    def wrote(self, count: int) -> None:
        """See OpenUpload."""
        self._services.metrics.bytes.labels("up", "update").inc(count)
        self.submission.run.rounds.bytes.total_up += count

    async def advance(self, count: int) -> None:
        """See OpenUpload."""
        self._shown.done += count
        await self._caller.pace(count)
        await self._decide(self.submission.check_wanted)

    def read(self, path: Path) -> UpdateContent:
        """See OpenUpload."""
        return self.gate.read(path, self.header.num_steps)

    async def check_content(self, content: UpdateContent, path: Source) -> None:
        """See OpenUpload."""
        digest, steps = digest_bytes(self.header.digest), self.header.num_steps
        self.check_digest(content.digest)
        update = self.gate.update_in(path, steps)
        self._norms = await self._decide_in_io(self.gate.check_content, update, digest, content)
        await self._decide(self.submission.check_wanted)

    def check_digest(self, came: bytes) -> None:
        """Raises UploadBroken for the first wrong digest; `check_content` has the update refused for the second."""
        wrong = self._verdicts.wrong_digests
        if came != digest_bytes(self.header.digest) and not wrong.is_second(self.header, self.client):
            raise UploadBroken(self.header.key, 0, "the bytes have not the digest of the header")

    async def admit(self) -> Receipt:
        """See OpenUpload."""
        run = self.submission.run
        run.rounds.bytes.upload_completed(self.client)
        clip_factor = self.gate.clip_factor(next(iter(self._norms.values())))
        receipt = await self._verdicts.admit(self.submission, self._norms, clip_factor)
        run.run_status.upload_stored()
        return receipt

    async def failed(self, error: StoreError) -> Receipt:
        """See OpenUpload. An update whose round was closed is late: its files are gone, also under an open upload."""
        try:
            await self._decide(self.submission.check_wanted)
        except Decided as decided:
            return decided.receipt
        if isinstance(error, StoreFull):
            self.submission.run.run_status.upload_failed(str(error))
        raise error

    async def _decide_in_io(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await self._disk.of_client(self.client, function, *args, **kwargs)
        except UpdateRefused as refusal:
            raise await self._refused(refusal) from None

    async def _decide(self, check: Callable[[], None]) -> None:
        try:
            check()
        except UpdateRefused as refusal:
            raise await self._refused(refusal) from None

    async def _refused(self, refusal: UpdateRefused) -> Decided:
        """The decision on an update that a rule refuses; the first one on the work stands."""
        first = await self._verdicts.receipt(self.submission.run, self.header.key, self.client)
        self._transfer.check()
        return Decided(first or await self._verdicts.refuse(self.submission, refusal))
