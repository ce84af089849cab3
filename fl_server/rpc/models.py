"""Models in and out: ExportModel sends a committed one; runs may start from another run's, an uploaded one, or a file.

An export is read from one open file. A commit may remove the model's checkpoint at any time, and an open file can still
be read to its end. Nothing on the wire is a path. What a caller cannot use as a first model is refused with one text,
whatever the reason.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, suppress
from functools import partial
from io import FileIO
from pathlib import Path

from fl_common.names import check_id
from fl_server.errors import InvalidInput, NoSuchModel, NotNow, ServerError
from fl_server.identity import actor, caller
from fl_server.rpc.access import OwnedRuns, check_export
from fl_server.rpc.views import round_summary
from fl_server.run.run import Run
from fl_server.runs.coordinator import Coordinator
from fl_server.runs.creation import unusable
from fl_server.services import Services
from fl_server.store.checkpoints import AVERAGED, COMMITTED, INITIAL
from fl_server.store.errors import NoCheckpoint, disk_errors, open_file_digest
from fl_server.store.uploaded_models import Upload, WrongBytes, is_safetensors
from fl_server.uploads.stream import StallTimeout
from protos.chunks import ChunkError, check_chunk, chunk_spans, make_chunk
from protos.codec import digest_message, digest_text
from protos.digests import digest_bytes
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1.tensor_pb2 import Chunk

_TRIES = 3
"""Choices of a round. A commit between the choice and the opening may remove the latest or best model."""
UPLOAD_CHUNK_BYTES = 512 << 10
_FREE_CHUNKS, _LEAST_CHUNK_BYTES = 64, 4096
"""A file of n bytes comes in at most _FREE_CHUNKS + n / _LEAST_CHUNK_BYTES chunks: each costs a write."""
_BUSY_WAIT_S = 1.0
Requests = AsyncIterator[pb.UploadModelRequest]


class ModelExports:
    """Exports models of all runs. Lives on the event loop; files are read in threads."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        self._services, self._coordinator = services, coordinator

    async def messages(self, run: Run, wanted: str, model: str = "") -> AsyncGenerator[pb.ExportModelResponse, None]:
        """The header and the chunks of a model. wanted: "latest", "best" or a round. model: see ExportModelRequest.

        Raises InvalidInput, NoSuchModel, NoBestRound, TooFewUpdates.
        """
        averaged = _is_averaged(run, model)
        round_, file = await self.opened(run, wanted, averaged=averaged)
        with file:
            header = await self._header(run, round_, file, "the averaged model of " if averaged else "")
            yield pb.ExportModelResponse(header=header)
            for offset, length in chunk_spans(header.size_bytes, self._services.config.limits.chunk_bytes):
                yield pb.ExportModelResponse(chunk=await self._services.in_io(_chunk, file, offset, length))

    async def opened(self, run: Run, wanted: str, *, averaged: bool = False) -> tuple[int, FileIO]:
        """The round and its open file. Raises InvalidInput, NoSuchModel, NoBestRound, TooFewUpdates."""
        checkpoints, round_ = self._services.checkpoints, INITIAL
        for _ in range(_TRIES):
            round_ = await self._coordinator.model_round(run, wanted)
            if averaged:
                _check_begun(run, round_)
            if run.config.client_privacy is None:  # noise protects the clients of a small round
                check_export(run.id, await run.context.commit_of(round_), self._services.config.rounds)
            try:
                opening = partial(checkpoints.open_model, run.id, round_, averaged=averaged)
                return round_, await self._services.in_io(opening)
            except NoCheckpoint:
                continue
        raise NoSuchModel(run.id, round_, await self._services.in_io(checkpoints.rounds, run.id))

    async def _header(self, run: Run, round_: int, file: FileIO, which: str) -> pb.ExportHeader:
        """The header, after the export was written to the history."""
        size = os.fstat(file.fileno()).st_size
        digest = await self._services.in_io(open_file_digest, file)
        name = "the first model" if round_ == INITIAL else f"round {round_}"
        what = f"{which}{name}, {digest_text(digest)}, {size} bytes"
        await self._coordinator.audit.model_exported(actor(), run.id, what)
        header = pb.ExportHeader(size_bytes=size, digest=digest_message(digest))
        if (commit := await run.context.commit_of(round_)) is not None:
            header.round.CopyFrom(round_summary(commit, hidden=run.context.hides_cohorts))
        return header


def _is_averaged(run: Run, model: str) -> bool:
    """Raises InvalidInput for an unknown model, and for the averaged one of a run that has none."""
    if model not in ("", COMMITTED, AVERAGED):
        raise InvalidInput("model", f'"{COMMITTED}" or "{AVERAGED}"', repr(model[:100]))
    if model == AVERAGED and run.config.averaging is None:
        expected = f'"{COMMITTED}" for run {run.id!r}, which has no section [averaging]'
        raise InvalidInput("model", expected, f'"{AVERAGED}"')
    return model == AVERAGED


def _check_begun(run: Run, round_: int) -> None:
    """Raises InvalidInput for a round before the first averaged model."""
    first = run.config.averaging.start if run.config.averaging else None
    if round_ < (first or 0):
        name = "none committed" if round_ == INITIAL else str(round_)
        raise InvalidInput("round", f"a round from {first or 0} on: the averaged model begins there", name)


def _chunk(file: FileIO, offset: int, length: int) -> Chunk:
    """A chunk of the file; blocking."""
    with disk_errors(f"read {file.name}"):
        chunk = make_chunk(os.pread(file.fileno(), length, offset), 0, length)
    chunk.offset = offset
    return chunk


class InitialModels:
    """Opens and receives models for the caller of the current call. Lives on the event loop; files in threads."""

    def __init__(self, services: Services, runs: OwnedRuns, exports: ModelExports) -> None:
        self._services, self._runs, self._exports = services, runs, exports

    async def opened(self, named: str) -> FileIO | None:
        """The open file that `initial_model` means; None if it is empty. The caller closes it.

        Raises InvalidInput, with the same text for every model that the caller cannot use.
        """
        if not named:
            return None
        kind, _, rest = named.partition(":")
        file: FileIO | None = None
        with suppress(ServerError, ValueError, OSError):
            if kind == "run":
                file = await self._of_run(rest)
            else:
                file = await self._services.in_io(self._file, kind, rest, _owner())
        if file is None:
            raise unusable(named)
        return file

    async def _of_run(self, named: str) -> FileIO:
        """A model that the caller may export."""
        run_id, _, round_ = named.partition(":")
        run = self._runs.to_change(run_id)
        return (await self._exports.opened(run, round_ or "latest"))[1]

    def _file(self, kind: str, name: str, owner: str) -> FileIO | None:
        """An uploaded file, or one of the folder; blocking. Raises OSError, ValueError."""
        folder = self._services.config.models_dir
        if kind == "upload":
            return _regular(self._services.uploaded.path(owner, bytes.fromhex(name)))
        if kind == "file" and folder is not None:
            return _regular(folder / check_id("initial_model", name))
        return None

    async def receive(self, requests: Requests) -> str:
        """Receive a file. Returns what `initial_model` names it. Raises InvalidInput, NotNow, StoreError."""
        stall, services = StallTimeout(self._services.config.limits), self._services
        header = await _next(requests, stall)
        if header is None or not header.HasField("header"):
            raise InvalidInput("part", "a header first", "nothing" if header is None else header.WhichOneof("part"))
        size, digest = self._described(header.header)
        release = header.header.release
        upload = await services.in_io(partial(services.uploaded.begin, _owner(), digest, size, release=release))
        try:
            await self._chunks(requests, stall, upload, size)
            await services.in_io(upload.finish)
        except (WrongBytes, ChunkError) as error:
            raise InvalidInput("chunk", "a file as its header describes it", error) from error
        finally:
            await services.in_io(upload.close)
        return f"upload:{digest.hex()}"

    def _described(self, header: pb.UploadModelHeader) -> tuple[int, bytes]:
        """Size and digest. Raises InvalidInput."""
        most = self._services.config.limits.max_update_mib << 20
        if not 0 < header.size_bytes <= most:
            raise InvalidInput("size_bytes", f"1 to {most} bytes (limits.max_update_mib)", header.size_bytes)
        try:
            return header.size_bytes, digest_bytes(header.digest)
        except ValueError as error:
            raise InvalidInput("digest", "BLAKE3-256 of the file", error) from error

    async def _chunks(self, requests: Requests, stall: StallTimeout, upload: Upload, size: int) -> None:
        """Write all chunks. Raises ChunkError, NotNow, StoreError."""
        done, left = 0, _FREE_CHUNKS + size // _LEAST_CHUNK_BYTES
        while done < size:
            request = await _next(requests, stall)
            if request is None or not request.HasField("chunk"):
                raise ChunkError(f"{done} of {size} bytes")
            if (left := left - 1) < 0:
                raise ChunkError("more chunks than a file of this size needs: send larger ones")
            data = bytes(check_chunk(request.chunk, done, UPLOAD_CHUNK_BYTES, size))
            stall.received(len(data))
            await self._services.in_io(upload.append, data)
            done += len(data)


async def _next(requests: Requests, stall: StallTimeout) -> pb.UploadModelRequest | None:
    try:
        return await stall.wait(anext(requests, None))
    except TimeoutError:
        raise NotNow(f"the file does not come: {stall}", _BUSY_WAIT_S) from None


def _owner() -> str:
    return str(caller.get())


def _regular(path: Path) -> FileIO | None:
    """The open file; None for a folder, a device or another format. Raises OSError, also for a link."""
    with ExitStack() as closing:
        file = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        closing.callback(file.close)
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and is_safetensors(file):
            closing.pop_all()
            return file
    return None
