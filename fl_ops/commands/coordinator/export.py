"""`fl export`: download a committed model as a safetensors file or an ONNX graph, or its adapter in peft's format."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import typer
from blake3 import blake3
from google.protobuf.json_format import MessageToDict

from fl_common import units
from fl_common.command_help import FlagGroup
from fl_ops.admin.client import AdminClient
from fl_ops.commands import completion
from fl_ops.commands.options import Context, admin_command
from fl_ops.errors import UsageError
from fl_ops.exports.download import frozen_digest, receive
from fl_ops.files import Target, check_free, read_run
from fl_ops.render import output
from protos.digests import digest_bytes, digest_text
from protos.fl.v1 import admin_pb2

if TYPE_CHECKING:
    from fl_tasks import Task


Model = Literal["committed", "averaged"]
"""Which model of a round."""
Format = Literal["whole", "adapter", "trainable", "onnx"]
"""The formats in which a model can be exported."""


@dataclass(frozen=True)
class ModelFlags(FlagGroup):
    """Which model, and in which form."""

    which: Annotated[str, typer.Option("--round", metavar="latest|best|N", help="The committed model to export.")] = (
        "latest"
    )
    model: Annotated[
        Model,
        typer.Option(
            help="committed: the model that clients train from; averaged: the mean of the committed models up to the"
            r" round, of a run with \[averaging]."
        ),
    ] = "committed"
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="whole: the state_dict; adapter: for peft.PeftModel.from_pretrained; trainable: without frozen"
            " parameters; onnx: a graph with all values, which is compared with the model.",
        ),
    ] = "whole"
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate-statistics",
            help="Compute the running statistics, as of batch normalisation, anew from the task's held-out examples on"
            " this machine. For averaged models; with --format whole.",
        ),
    ] = False
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=r"A run's file, whose \[task] is imported if the export needs the model. Without it, only a built-in"
            " or installed task is.",
        ),
    ] = None

    def check(self) -> None:
        """Raises UsageError."""
        if self.which not in {"latest", "best"} and not (self.which.isascii() and self.which.isdigit()):
            raise UsageError(f"--round: expected latest, best or a round's number, got {self.which!r}")
        if self.estimate and self.form != "whole":
            raise UsageError(f"--estimate-statistics: expected --format whole, got {self.form}")


@admin_command
def export(
    context: Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", autocompletion=completion.run_names)],
    out: Annotated[Path, typer.Option(metavar="PATH", help="The new file; with --format adapter, a new folder.")],
    wanted: ModelFlags,
    force: Annotated[bool, typer.Option("--force", help="Replace an older file.")] = False,
) -> None:
    """Download a run's model as a file. It appears complete and verified, or not at all."""
    wanted.check()
    target = Target(out, replace=force)
    check_free(target, "choose another --out, or use --force")
    with context.connect() as client:
        writer = _folder if wanted.form == "adapter" else _file
        header, size, digest = writer(_Export(client, run, wanted), target)
    facts = {"path": str(out), "run_id": run, "model": wanted.model, "size_bytes": size, "digest": digest}
    which_one = f"{'averaged model of ' if wanted.model == 'averaged' else ''}round {header.round.round}"
    text = f"{out}: {run}, {which_one}, {units.size(size)}, {digest}"
    context.show({**facts, "round": output.to_json(header.round)}, units.plain(text))


@dataclass(frozen=True, slots=True)
class _Export:
    client: AdminClient
    run: str
    wanted: ModelFlags

    def parts(self) -> Iterator[admin_pb2.ExportModelResponse]:
        """The model from the coordinator."""
        return self.client.models.export_model(self.run, self.wanted.which, self.wanted.model)

    def task(self) -> Task:
        """The run's task, as the user's file or the coordinator names it."""
        from fl_ops.exports.formats import task_of  # imported here: it loads torch

        config = self.wanted.config
        spec = self.client.runs.get_run(self.run, 0).run.spec.task if config is None else read_run(config).task
        return task_of(spec.name, MessageToDict(spec.options), trusted=config is not None)


_Exported = tuple[admin_pb2.ExportHeader, int, str]
"""Header, size and digest of what was written."""


def _file(export: _Export, target: Target) -> _Exported:
    wanted = export.wanted
    changed: list[Path] = []

    def finish(file: BinaryIO, path: Path) -> None:
        lacks_frozen = bool(frozen_digest(path))
        if wanted.form != "onnx" and lacks_frozen != (wanted.form == "whole") and not wanted.estimate:
            return  # it has what is asked for
        from fl_ops.exports import formats, onnx_graph  # imported here: they load torch

        write = formats.write_whole if lacks_frozen else formats.write_trained
        write = formats.write_estimated if wanted.estimate else write
        write = onnx_graph.write_onnx if wanted.form == "onnx" else write
        with formats.rewriting(file, target.path.parent) as model:
            write(path, model, export.task())
        changed.append(target.path)

    header = receive(export.parts(), target, finish)
    if not changed:
        return header, header.size_bytes, digest_text(digest_bytes(header.digest))
    return header, target.path.stat().st_size, _digest(target.path)


def _folder(export: _Export, target: Target) -> _Exported:
    from fl_ops.exports.formats import write_adapter  # imported here: it loads torch

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.safetensors"
        header = receive(export.parts(), Target(model))
        written = write_adapter(model, target, export.task())
    return header, written.stat().st_size, _digest(written)


def _digest(path: Path) -> str:
    return digest_text(blake3().update_mmap(path).digest())
