"""One upload at a worker: the coordinator decides about it through one call; see `OpenUpload`.

A worker has no ledger. In an object store it puts parts of updates: the coordinator tells it which loose parts of an
upload may be used, and gets the parts of the whole update.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from fl_server.admission.norms import UpdateContent, read_update
from fl_server.aggregation.updates import (
    Decoding,
    EncodedUpdate,
    PayloadShape,
    Source,
    UpdateKeys,
    UpdateShape,
    buffers_in,
    read_block,
)
from fl_server.store.database.store import StoredFile
from fl_server.store.errors import StoreError, StoreFull, file_digest
from fl_server.store.objects.bucket import Bucket, ObjectReader
from fl_server.store.objects.files import PART_BYTES, StoredFiles
from fl_server.store.objects.local_cache import LocalCache
from fl_server.store.spool.spool import Spool
from fl_server.uploads.part_receiver import Decided, spool_key
from fl_server.worker.link import CoordinatedTransfer, EarlyAnswer, Link, caller_now
from protos.codec import Layout, digest_bytes
from protos.encodings import PLAIN, EncodingSpec
from protos.fl.v1 import worker_pb2 as pb
from protos.fl.v1.training_pb2 import Receipt, UpdateHeader

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Store:
    """Where a worker keeps updates."""

    spool: Spool
    files: WorkerFiles | None = None
    """The object store; None: the coordinator has the folder of the spool too."""


BUFFER_PIECE = 1 << 20
"""Bytes of an update's buffers in a message."""


class RelayedUpload:
    """An upload whose header the coordinator has accepted: `async with RelayedUpload(...)` asks it."""

    def __init__(self, link: Link, header: UpdateHeader, store: Store) -> None:
        self._header, self._store = header, store
        call = link.stream("ReceiveUpdate", pb.ReceiveUpdateRequest, pb.ReceiveUpdateResponse)
        self._transfer = CoordinatedTransfer(call, lambda count: pb.ReceiveUpdateRequest(written=count))
        self._plan: ReadingPlan
        self._buffers = b""

    async def __aenter__(self) -> Self:
        await self._transfer.__aenter__()
        try:
            opening = pb.UploadOpening(caller=caller_now(), header=self._header)
            plan = (await self._asked(pb.ReceiveUpdateRequest(opening=opening))).plan
        except BaseException:
            await self._transfer.close()
            raise
        self._plan = ReadingPlan(plan)
        if (files := self._store.files) is not None:
            files.give(self._name(files), plan.parts)
        self._transfer.begin(plan.report_bytes)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._transfer.__aexit__(*error)

    @property
    def header(self) -> UpdateHeader:
        """See OpenUpload."""
        return self._header

    @property
    def client(self) -> str:
        """See OpenUpload."""
        return self._plan.client

    def _name(self, files: WorkerFiles) -> str:
        key = spool_key(self._header.key, self.client)
        return files.name(self._store.spool.path(key, digest_bytes(self._header.digest)))

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """See OpenUpload."""
        try:
            return await self._transfer.unless_ended(work)
        except EarlyAnswer:
            raise await self._decision() from None

    def check(self) -> None:
        """See OpenUpload. The end of the coordinator's call ends `unless_ended`."""

    def is_over(self) -> bool:
        """See OpenUpload. The coordinator removes what is left when its call ends."""
        return False

    def wrote(self, count: int) -> None:
        """See OpenUpload. `advance` reports them."""

    async def advance(self, count: int) -> None:
        """See OpenUpload."""
        await self._transfer.moved(count)

    def read(self, path: Path) -> UpdateContent:
        """See OpenUpload. Its buffers are read too, which the coordinator checks."""
        content, self._buffers = self._plan.read(path)
        return content

    async def check_content(self, content: UpdateContent, path: Path) -> None:
        """See OpenUpload."""
        del path
        try:
            await self._transfer.moved(0, now=True)
            for piece in _pieces(self._buffers):
                await self._transfer.send(pb.ReceiveUpdateRequest(buffers=piece))
        except EarlyAnswer:
            raise await self._decision() from None
        said = pb.UploadContent(digest=content.digest, squares=content.squares, wrong=content.wrong)
        await self._asked(pb.ReceiveUpdateRequest(content=said))

    async def admit(self) -> Receipt:
        """See OpenUpload."""
        place, files = pb.UploadPlace(), self._store.files
        if files is not None and (stored := files.take(self._name(files))) is not None:
            place = pb.UploadPlace(parts=stored.parts, part_bytes=stored.part_bytes)
        return await self._receipt(pb.ReceiveUpdateRequest(place=place))

    async def failed(self, error: StoreError) -> Receipt:
        """See OpenUpload. The coordinator answers with the receipt of an update that came too late, or a status."""
        failure = pb.UploadFailure(is_full=isinstance(error, StoreFull), why=str(error)[:500])
        return await self._receipt(pb.ReceiveUpdateRequest(failure=failure))

    async def _receipt(self, message: pb.ReceiveUpdateRequest) -> Receipt:
        try:
            await self._asked(message)
        except Decided as decided:
            return decided.receipt
        raise RuntimeError("expected a receipt of the coordinator, got another answer")

    async def _asked(self, message: pb.ReceiveUpdateRequest) -> pb.ReceiveUpdateResponse:
        """The coordinator's answer to a message. Raises Decided, and the error that ended the call."""
        try:
            await self._transfer.send(message)
        except EarlyAnswer:
            raise await self._decision() from None
        answer: pb.ReceiveUpdateResponse = await self._transfer.answer()
        if answer.HasField("receipt"):
            await self._transfer.finish()
            raise Decided(answer.receipt)
        return answer

    async def _decision(self) -> Exception:
        """The decision that came early. Raises the error that ended the call."""
        return Decided((await self._transfer.answer()).receipt)


class ReadingPlan:
    """How a whole update is read, as the coordinator says."""

    def __init__(self, plan: pb.UploadPlan) -> None:
        self.client = plan.client_id
        self._digest_only = plan.digest_only or not plan.payloads
        self._shape = shape_of(plan)
        self._decoding = Decoding(
            GivenKeys(dict(zip((each.payload for each in plan.payloads), plan.keys, strict=False)))
        )

    def read(self, path: Path) -> tuple[UpdateContent, bytes]:
        """What admission has to know of the bytes, and the values of the buffers. Blocking."""
        if self._digest_only:
            return UpdateContent(file_digest(path), ()), b""
        shape = self._shape
        update = path if shape.plain else EncodedUpdate(path, shape, self._decoding)
        content = read_update(update, shape)
        return content, b"" if content.wrong else _buffers(update, shape)


class GivenKeys(UpdateKeys):
    """The keys of an update's payloads that the coordinator has derived: a worker does not know the run's seed."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        super().__init__(0, 0)
        self._made = keys


def shape_of(plan: pb.UploadPlan) -> UpdateShape:
    """The payloads of an update."""
    shapes: list[PayloadShape] = []
    base = encoded_base = 0
    for payload in plan.payloads:
        layout = Layout.from_manifest(payload.manifest, 1 << 62)
        encoding = PLAIN if payload.encoding == PLAIN.name else EncodingSpec(payload.encoding, payload.fraction)
        shapes.append(PayloadShape(payload.payload, layout, base, encoding, encoded_base))
        base += layout.size_bytes
        encoded_base += shapes[-1].encoded.size_bytes
    return UpdateShape(tuple(shapes))


def _buffers(update: Source, shape: UpdateShape) -> bytes:
    """The values of an update's buffers, one after the other."""
    blocks = (read_block(update, entry, 0, entry.numel) for entry in buffers_in(shape))
    return b"".join(block.contiguous().view(torch.uint8).numpy().tobytes() for block in blocks)


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + BUFFER_PIECE] for start in range(0, len(data), BUFFER_PIECE))


class WorkerFiles(StoredFiles):
    """The files of a worker's uploads. Blocking and thread-safe. Raises StoreUnavailable while the store fails."""

    def __init__(self, bucket: Bucket, root: str, state_dir: Path, cache: LocalCache) -> None:
        """root: the coordinator's folder of objects. state_dir: the worker's own, or the coordinator's."""
        ObjectReader.__init__(self, bucket, root)
        self.cache, self._state_dir, self.part_bytes = cache, state_dir, PART_BYTES
        self.epoch = 0
        """The coordinator's, a part of the names of objects."""
        # No two writers give an object one name: the removal of the one would remove the other's.
        self._counts = count(secrets.randbits(48))
        self._lock = threading.Lock()
        self._files: dict[str, StoredFile] = {}
        self._loose: dict[str, dict[str, int]] = {}
        self._sealed: dict[str, StoredFile] = {}
        self._unsure = deque[str](maxlen=0)  # the coordinator finds them

    def give(self, name: str, parts: Sequence[str]) -> None:
        """The coordinator lets an upload use these loose parts of its file, and no others."""
        with self._lock:
            self._loose[name] = dict.fromkeys(parts, 0)

    def take(self, name: str) -> StoredFile | None:
        """A sealed file, which is not known here any more."""
        with self._lock:
            self._loose.pop(name, None)
            return self._sealed.pop(name, None)

    def unfinished(self, folder: str) -> list[str]:
        """None: the coordinator removes what is left of other uploads."""
        del folder
        return []

    def count(self, files: Sequence[StoredFile], *, fsynced: bool = False) -> None:
        """Keep the files until the coordinator is told."""
        del fsynced
        with self._lock:
            self._sealed.update({file.name: file for file in files})

    def kept(self, name: str) -> int:
        """0: the coordinator knows."""
        del name
        return 0

    def remove(self, folder: str) -> None:
        """Forget copies. The coordinator removes objects."""
        self.cache.forget(self._state_dir / folder)

    def remove_file(self, name: str) -> None:
        """The same for one file."""
        with self._lock:
            self._loose.pop(name, None)
            self._sealed.pop(name, None)
        self.cache.forget(self._state_dir / name)
