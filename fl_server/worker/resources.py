"""A machine's copies of what clients fetch: files of encoded messages, which its workers share.

A file has the messages of one resource as they go to clients, each behind its length. It is written beside its place
and renamed, so it is whole or not there. Clients check every chunk and the whole: a damaged copy is noticed there.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import grpc.aio

from fl_common.files import make_folders
from fl_server.store.files import disk_errors
from fl_server.worker.link import Link, error_of
from protos.chunks import read_chunk
from protos.codec import digest_message
from protos.fl.v1 import worker_pb2 as pb

_LENGTH = struct.Struct("<Q")
OPEN = 16
"""Copies that are open; the least recently used is closed first, unless a download reads it."""
RECENT = 4
"""Messages of a copy that are kept: clients that fetch at the same time share them."""


class Copy:
    """One resource."""

    def __init__(self, path: Path) -> None:
        with disk_errors(f"open {path}"), path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._spans = list(_spans(self._map))
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        first = read_chunk(self.message(1)[0]) if len(self._spans) > 1 else None
        self._chunk_bytes = len(first.data) if first is not None else 1

    def places(self, offset: int) -> range | tuple[int, ...]:
        """Positions of the messages to send: the header, and the chunks from the last chunk border up to `offset`."""
        return (0, *range(1 + offset // self._chunk_bytes, len(self._spans)))

    def message(self, place: int) -> tuple[bytes, int]:
        """An encoded message, and its number of tensor bytes (0 for the header)."""
        message = self._recent.get(place)
        if message is None:
            start, end = self._spans[place]
            message = self._recent[place] = self._map[start:end]
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        chunk = read_chunk(message) if place else None
        return message, 0 if chunk is None else len(chunk.data)


def _spans(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield at, at + length
        at += length


class Copies:
    """The copies of one machine. Lives on the event loop of a worker; files are shared with other workers."""

    def __init__(self, link: Link, folder: Path, most_bytes: int) -> None:
        self._link, self._folder, self._most = link, folder, most_bytes
        self._open: OrderedDict[bytes, Copy] = OrderedDict()
        self._fetching: dict[bytes, asyncio.Task[Copy]] = {}

    async def of(self, digest: bytes) -> Copy:
        """The copy of a resource, made if it is not there yet. Raises the error for the client."""
        if (copy := self._open.get(digest)) is not None:
            self._open.move_to_end(digest)
            return copy
        if (fetching := self._fetching.get(digest)) is None:
            fetching = self._fetching[digest] = asyncio.create_task(self._fetched(digest))
            fetching.add_done_callback(lambda _: self._fetching.pop(digest, None))
        copy = await asyncio.shield(fetching)
        self._open[digest] = copy
        while len(self._open) > OPEN:
            self._open.popitem(last=False)
        return copy

    async def _fetched(self, digest: bytes) -> Copy:
        path = self._folder / digest.hex()
        if not path.exists():
            await self._fetch(digest, path)
        return await asyncio.to_thread(Copy, path)

    async def _fetch(self, digest: bytes, path: Path) -> None:
        """Write the file. Several workers may do so at the same time: each has its own until it is renamed."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with disk_errors(f"write {path}"):
            make_folders(self._folder, durable=False)
        call = self._link.resource(pb.FetchResourceRequest(digest=digest_message(digest)))
        try:
            with disk_errors(f"write {path}"), temporary.open("wb") as file:
                async for piece in call:
                    await asyncio.to_thread(file.writelines, (_LENGTH.pack(len(piece.message)), piece.message))
            with disk_errors(f"write {path}"):
                temporary.replace(path)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()
            temporary.unlink(missing_ok=True)
        await asyncio.to_thread(self._make_room, path)

    def _make_room(self, newest: Path) -> None:
        """Remove the oldest files over the limit. One that is open can be read until it is closed."""
        with disk_errors(f"make room in {self._folder}"):
            files = [(path.stat().st_mtime, path.stat().st_size, path) for path in self._folder.iterdir()]
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total > self._most and path != newest:
                    path.unlink(missing_ok=True)
                    total -= size
