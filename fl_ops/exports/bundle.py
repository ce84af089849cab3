"""Makes the files of a release from an exported model, and their description, on the machine of the signer.

The signer's machine sees the bytes that it signs: it downloads the model, makes the form, and sends the files back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from blake3 import blake3

from fl_common.released import WEIGHTS, Description, ReleasedFile
from fl_ops.errors import UsageError
from fl_ops.exports.download import Parts, frozen_digest, receive
from fl_ops.files import Target
from protos.fl.v1 import admin_pb2

if TYPE_CHECKING:
    from fl_tasks import Task

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of a release, one after the other in an open file."""

    file: BinaryIO
    files: list[ReleasedFile]
    digest: str
    header: admin_pb2.ExportHeader

    def described(self, base: dict[str, object]) -> Description:
        """The description of these files. base: the fields that are not of the files. Raises UsageError."""
        round_ = self.header.round.round if self.header.HasField("round") else None
        size = sum(file.size for file in self.files)
        try:
            return Description.model_validate(
                {**base, "round": round_, "files": self.files, "size": size, "digest": self.digest}
            )
        except ValueError as error:
            raise UsageError(f"the release cannot be described: {error}") from error


@contextmanager
def bundled(parts: Parts, form: str, task: Callable[[], Task]) -> Iterator[Bundle]:
    """The files of a form of an exported model. task: gives the run's task, which some forms need. Raises OpsError."""
    with tempfile.TemporaryDirectory(prefix="fl-release-") as name:
        folder = Path(name)
        exported, made = folder / "exported.safetensors", folder / "files"
        header = receive(parts, Target(exported))
        made.mkdir()
        _make(form, exported, made, task)
        with (folder / "bundle").open("w+b") as file:
            files, whole = [], blake3()
            for path in sorted(made.iterdir()):
                files.append(_append(path, file, whole))
                path.unlink()
            file.flush()
            yield Bundle(file, files, whole.hexdigest(), header)


def _make(form: str, exported: Path, made: Path, task: Callable[[], Task]) -> None:
    """Write the files of a form into a folder."""
    if form == "whole" and not frozen_digest(exported):
        exported.rename(made / WEIGHTS)
        return
    from fl_ops.exports import formats  # imported here: it loads torch

    of = task()
    if form == "adapter":
        formats.write_adapter(exported, Target(made, replace=True), of)
        formats.write_trained(exported, made / WEIGHTS, of)
        return
    if form == "onnx":
        from fl_ops.exports.onnx_graph import GRAPH, write_onnx

        write_onnx(exported, made / GRAPH, of)
    formats.write_whole(exported, made / WEIGHTS, of)


def _append(path: Path, file: BinaryIO, whole: blake3) -> ReleasedFile:
    own, size = blake3(), 0
    with path.open("rb") as source:
        while block := source.read(_BLOCK):
            file.write(block)
            own.update(block)
            whole.update(block)
            size += len(block)
    return ReleasedFile(name=path.name, size=size, digest=own.hexdigest())
