"""The averaged model of a run: float64 sums in files, made block by block, so that no sum is ever whole in memory.

The sums of a round belong to its checkpoint: they are made from those of the round before while it is written. The
averaged model has the mean of the parameters and of the floating buffers, and the latest integer buffers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from algorithms.averaging import Averaging, Term, mean_of, stepped
from fl_common.files import fsync_path
from fl_server.store.files import disk_errors, file_digest
from protos.digests import digest_text

BLOCK = 1 << 16
"""Entries of a block."""


@dataclass(frozen=True, slots=True)
class AveragedModel:
    """The averaged model after a round."""

    rule: Averaging
    round: int
    model: Mapping[str, torch.Tensor]
    """The committed model as clients get it: parameters and buffers."""
    folder: Path | None = None
    """Has the sums of this round. None: they are not written yet."""
    before: Path | None = None
    """Has the sums of the round before; None if there are none."""

    @property
    def files(self) -> list[str]:
        """Names of the files of the sums."""
        return [file_of(name) for name in self.rule.terms(self.round)]

    def write_sums(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Write the sums into a folder, durably. Returns name -> digest and size of each file. Raises StoreError."""
        entries = {}
        for name, term in self.rule.terms(self.round).items():
            path = folder / file_of(name)
            with disk_errors(f"write {path}"):
                if self.folder is None:
                    digest = self._write(path, name, term)
                else:
                    shutil.copyfile(self.folder / path.name, path)
                    digest = file_digest(path)
                fsync_path(path)
                entries[path.name] = {"digest": digest_text(digest), "size_bytes": path.stat().st_size}
        return entries

    def values(self, folder: Path | None = None) -> dict[str, torch.Tensor]:
        """The averaged model, each value rounded once to the dtype of the model. In memory of its own.

        folder: with the sums of this round, if they have just been written.
        """
        folder, mean = folder or self.folder, self.rule.mean(self.round)
        if folder is None or mean is None:
            raise RuntimeError("expected the sums of an averaged model, got one whose sums are not written")
        averaged = {name: torch.empty_like(tensor) for name, tensor in self.model.items()}
        path = folder / file_of(mean.sum)
        with disk_errors(f"read {path}"), path.open("rb") as file:
            for into in _blocks(averaged):
                into.copy_(mean_of(_read(file, into.numel()), mean, into.dtype))
        for name, tensor in self.model.items():
            if not tensor.is_floating_point():
                averaged[name].copy_(tensor)
        return averaged

    def _write(self, path: Path, name: str, term: Term) -> bytes:
        hasher = blake3()
        with ExitStack() as stack:
            before: BufferedReader | None = None
            if term.keep:
                if self.before is None:
                    raise RuntimeError(f"expected the sums of round {self.round - 1}, got none")
                before = stack.enter_context((self.before / file_of(name)).open("rb"))
            file = stack.enter_context(path.open("wb"))
            for x in _blocks(self.model):
                total = stepped(None if before is None else _read(before, x.numel()), x, term)
                raw = total.numpy().tobytes()
                hasher.update(raw)
                file.write(raw)
        return hasher.digest()


def file_of(name: str) -> str:
    """The file of a sum."""
    return f"sum-{name}.f64"


def _blocks(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Views of the floating tensors, in blocks."""
    for tensor in tensors.values():
        if tensor.is_floating_point():
            yield from tensor.view(-1).split(BLOCK)


def _read(file: BufferedReader, count: int) -> torch.Tensor:
    raw = bytearray(8 * count)
    if file.readinto(raw) != len(raw):
        raise OSError("the file of a sum is too short")
    return torch.frombuffer(raw, dtype=torch.float64) if count else torch.empty(0, dtype=torch.float64)
