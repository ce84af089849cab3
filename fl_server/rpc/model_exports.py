"""ExportModel: a committed model as a safetensors file, read from one open file.

A commit may remove the model's checkpoint at any time. An open file can still be read to its end.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from functools import partial
from io import FileIO

from fl_server.errors import InvalidInput, NoSuchModel
from fl_server.identity import actor
from fl_server.rpc.access.floors import check_export
from fl_server.rpc.views import round_summary
from fl_server.run.committed.lookup import committed_round
from fl_server.run.run import Run
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from fl_server.store.checkpoints import AVERAGED, COMMITTED, INITIAL
from fl_server.store.errors import NoCheckpoint
from fl_server.store.files import disk_errors, open_file_digest
from protos.codec import chunk_spans, digest_message, digest_text, make_chunk
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1.tensor_pb2 import Chunk

_TRIES = 3
"""Choices of a round. A commit between the choice and the opening may remove the latest or best model."""


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
            check_export(run.id, await committed_round(run.context, round_), self._services.config.rounds)
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
        if (commit := await committed_round(run.context, round_)) is not None:
            header.round.CopyFrom(round_summary(commit))
        return header


def _is_averaged(run: Run, model: str) -> bool:
    """Raises InvalidInput for an unknown model, and for the averaged one of a run that has none."""
    if model not in ("", COMMITTED, AVERAGED):
        raise InvalidInput("model", f'"{COMMITTED}" or "{AVERAGED}"', repr(model[:100]))
    if model == AVERAGED and run.config.averaging is None:
        raise InvalidInput(
            "model", f'"{COMMITTED}" for run {run.id!r}, which has no section [averaging]', f'"{AVERAGED}"'
        )
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
