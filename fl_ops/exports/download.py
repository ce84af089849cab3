"""Receives an exported model into a file, checked against its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from fl_ops.errors import Refused
from fl_ops.files import Target, written_whole
from protos.digests import digest_bytes, digest_text
from protos.fl.v1 import admin_pb2
from protos.wire import MAX_CHUNK_BYTES

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
