"""`fl export`: download a committed model as a safetensors file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from blake3 import blake3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from fl_ops.commands import completion
from fl_ops.commands.options import Context, admin_command
from fl_ops.errors import Refused, UsageError
from fl_ops.files import Target, check_free, written_whole
from fl_ops.render import output, units
from protos.digests import digest_bytes, digest_text
from protos.fl.v1 import admin_pb2
from protos.wire import MAX_CHUNK_BYTES

Parts = Iterator[admin_pb2.ExportModelResponse]


@admin_command
def export(
    context: Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", autocompletion=completion.run_names)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Path of the safetensors file.")],
    which: Annotated[
        str, typer.Option("--round", metavar="latest|best|N", help="The committed model to export.")
    ] = "latest",
    force: Annotated[bool, typer.Option("--force", help="Replace an older file.")] = False,
) -> None:
    """Download a run's model as a safetensors file. The file appears complete and verified, or not at all."""
    if which not in ("latest", "best") and not (which.isascii() and which.isdigit()):
        raise UsageError(f"--round: expected latest, best or a round's number, got {which!r}")
    target = Target(out, replace=force)
    check_free(target, "choose another --out, or use --force")
    with context.connect() as client:
        header = receive(client.export_model(run, which), target)
    digest = digest_text(digest_bytes(header.digest))
    facts = {"path": str(out), "run_id": run, "size_bytes": header.size_bytes, "digest": digest}
    text = f"{out}: {run}, round {header.round.round}, {units.size(header.size_bytes)}, {digest}"
    output.show({**facts, "round": output.to_json(header.round)}, units.plain(text), context.as_json)


def receive(parts: Parts, target: Target) -> admin_pb2.ExportHeader:
    """Write an ExportModel stream to a file. Returns its header.

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
