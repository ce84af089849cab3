"""The models that runs may start from: of another run, sent by the caller, or in the coordinator's folder of models.

Nothing on the wire is a path. What the caller cannot use is refused with one text, whatever the reason.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from fl_common.names import check_id
from fl_server.errors import InvalidInput, NotNow, ServerError
from fl_server.identity import caller
from fl_server.rpc.access.owners import OwnedRuns
from fl_server.rpc.model_exports import ModelExports
from fl_server.runs.creation import unusable
from fl_server.services import Services
from fl_server.store.uploaded_models import Upload, WrongBytes, is_safetensors
from fl_server.uploads.chunk_stream import StallTimeout
from protos.chunks import ChunkError, check_chunk
from protos.digests import digest_bytes
from protos.fl.v1 import admin_pb2 as pb

UPLOAD_CHUNK_BYTES = 512 << 10
_FREE_CHUNKS, _LEAST_CHUNK_BYTES = 64, 4096
"""A file of n bytes comes in at most _FREE_CHUNKS + n / _LEAST_CHUNK_BYTES chunks: each costs a write."""
_BUSY_WAIT_S = 1.0

Requests = AsyncIterator[pb.UploadModelRequest]


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
        upload = await services.in_io(services.uploaded.begin, _owner(), digest, size)
        try:
            await self._chunks(requests, stall, upload, size)
            await services.in_io(upload.finish)
        except (WrongBytes, ChunkError) as error:
            raise InvalidInput("chunk", "a safetensors file as its header describes it", error) from error
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
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and is_safetensors(file):
            return file
    except OSError:
        file.close()
        raise
    file.close()
    return None
