"""Receives an exported model into a file, checked against its digest, and reads the file's header without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from fl_common.settings import parse_json
from fl_ops.errors import Refused, UsageError
from fl_ops.files import Target, written_whole
from protos.digests import digest_bytes, digest_text
from protos.fl.v1 import admin_pb2
from protos.wire import MAX_CHUNK_BYTES

FROZEN = "frozen"
"""Key of a checkpoint's file: digest of the frozen parameters that it leaves out."""

_LENGTH_BYTES, _MOST_BYTES = 8, 100_000_000
"""The bytes of the header's length, and of the longest header that the format allows."""


@contextmanager
def opened_model(path: Path) -> Iterator[BinaryIO]:
    """A safetensors file, open for reading. Raises UsageError for another file, of which nothing is sent."""
    try:
        with path.open("rb") as file:
            if not isinstance(parse_json(_header(file)), dict):
                raise ValueError("its header is no table")
            yield file
    except (OSError, ValueError) as error:
        raise UsageError(f"initial_model: expected a safetensors file, got {path}: {error}") from error


def _header(file: BinaryIO) -> bytes:
    """The text of the header; empty if it is longer than the file or than the format allows."""
    length, size = int.from_bytes(file.read(_LENGTH_BYTES), "little"), os.fstat(file.fileno()).st_size
    return file.read(length) if length <= min(_MOST_BYTES, size) else b""


def frozen_digest(path: Path) -> str:
    """Digest of the frozen parameters that the file leaves out; empty for none, and for a file of another format."""
    with path.open("rb") as file:
        text = _header(file)
    try:
        metadata = parse_json(text)["__metadata__"]
    except (ValueError, KeyError, TypeError):
        return ""
    digest = metadata.get(FROZEN, "") if isinstance(metadata, dict) else ""
    return digest if isinstance(digest, str) else ""


Parts = Iterator[admin_pb2.ExportModelResponse]


def receive(
    parts: Parts, target: Target, finish: Callable[[BinaryIO, Path], object] = lambda file, path: None
) -> admin_pb2.ExportHeader:
    """Write an ExportModel stream to a file. Returns its header.

    finish: called with the verified file and a path to read it, before it appears. It may write another content.

    Raises:
        Refused: the stream is incomplete, out of order or damaged, or its digest differs from the header's.
        OpsError: errors of the stream itself, and of `written_whole`.
    """
    first = next(parts, None)
    if first is None or first.WhichOneof("part") != "header":
        raise Refused(
            "expected a model's header first, got another message: the coordinator may be newer than this command"
        )
    header = first.header
    try:
        expected = digest_bytes(header.digest)
        with written_whole(target) as file:
            got = _copy(parts, file, header.size_bytes)
            if got != expected:
                raise Refused(f"expected the digest {digest_text(expected)}, got {digest_text(got)}: export again")
            file.flush()
            finish(file, Path(f"/proc/self/fd/{file.fileno()}"))  # its name is only known to the writer
    except ValueError as exc:
        raise Refused(f"the coordinator sent a damaged model, export again: {exc}") from exc
    return header


def _copy(parts: Parts, file: BinaryIO, size: int) -> bytes:
    """Write `size` bytes of chunks, with a progress bar if stderr is a terminal. Returns their digest."""
    from protos.chunks import check_chunk  # imported here: it loads numpy, which other commands do not need

    hasher, done = blake3(), 0
    with _progress_bar() as bar:
        task = bar.add_task("", total=size)
        for part in parts:
            data = check_chunk(part.chunk, done, MAX_CHUNK_BYTES, size)
            file.write(data)
            hasher.update(data)
            done += len(data)
            bar.update(task, completed=done)
    if done != size:
        raise ValueError(f"expected {size} bytes, got {done}")
    return hasher.digest()


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
