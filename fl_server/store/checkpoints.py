"""Committed models on disk: written beside, fsynced, renamed; at a restart the newest valid one wins.

    run-ID/round-000012/model.safetensors      trainable parameters, buffers and frozen parts, by state_dict name
                        memory-Delta.safetensors    one file for each model-sized memory of the algorithm
                        meta.json              facts, and each file's digest and order of tensors

`round-initial` is the model before round 0. A folder that fails its digests is put aside as `*.damaged`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch

from fl_server.store.base import StoreError
from fl_server.store.bundle_files import Damaged, read_meta, read_tensors, write_meta, write_tensors
from fl_server.store.files import (
    check_id,
    disk_errors,
    fsync_path,
    make_folders,
    remove_folder,
    run_folder,
    sync_names,
)

log = structlog.get_logger(__name__)

INITIAL = -1
"""The round number of a run's first model."""

_TEMPORARY = ".part-"
_REPLACED = ".replaced-"
_MODEL = "model.safetensors"
_FOLDER = re.compile(r"round-(initial|\d{6,})")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a run needs to go on from a round."""

    model: Tensors
    """Name -> tensor of the whole state_dict: trainable parameters, buffers and frozen parts."""
    memory: Mapping[str, Tensors] = field(default_factory=dict)
    """The algorithm's model-sized state by the paper's symbol, such as "Delta"."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: config digest, seed, learning rate ...; "round" is set by `save`."""


class Checkpoints:
    """The checkpoints of all runs in one directory, for one writer. Blocking; raises StoreError and StoreFull."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        with disk_errors(f"open the checkpoints in {self._directory}"):
            make_folders(self._directory, durable=True)
            _clear_up(self._directory)
            sync_names([self._directory, *self._directory.glob("run-*")])

    def save(self, run_id: str, round: int, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint; its folder is durable and whole when this returns, or nothing of it is there.

        A round saved before is replaced. Raises StoreFull with the older checkpoints untouched.
        """
        target = self._folder(run_id, round)
        temporary = target.with_name(_TEMPORARY + target.name)
        try:
            with disk_errors(f"save the checkpoint of run {run_id!r} round {round}"):
                make_folders(target.parent, durable=True)
                if temporary.exists():  # what a failed attempt could not remove
                    shutil.rmtree(temporary)
                temporary.mkdir()
                _write(temporary, Checkpoint(checkpoint.model, checkpoint.memory, {**checkpoint.facts, "round": round}))
                fsync_path(temporary)
                _put_in_place(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    def load(self, run_id: str, round: int) -> Checkpoint:
        """The checkpoint of one round, its digests checked. StoreError if it is missing or damaged."""
        folder = self._folder(run_id, round)
        if not folder.is_dir():
            known = ", ".join(map(str, self.rounds(run_id))) or "none"
            raise StoreError(f"run {run_id!r} has no checkpoint of round {round}; there are: {known}")
        try:
            return _read(folder)
        except Damaged as error:
            raise StoreError(f"the checkpoint {folder} is damaged: {error}; take another round") from error

    def latest(self, run_id: str) -> Checkpoint | None:
        """The newest valid checkpoint; None if there is none. Damaged ones on the way are put aside with a warning."""
        for round in reversed(self.rounds(run_id)):
            folder = self._folder(run_id, round)
            try:
                return _read(folder)
            except Damaged as error:
                kept = folder.with_name(folder.name + ".damaged")
                log.warning("checkpoint_damaged", run=run_id, round=round, why=str(error), kept_as=str(kept))
                remove_folder(kept, f"make room for {kept}")
                with disk_errors(f"put the damaged checkpoint {folder} aside"):
                    folder.rename(kept)
        return None

    def rounds(self, run_id: str) -> list[int]:
        """Rounds with a checkpoint, oldest first; INITIAL (-1) for the first model. Digests are not checked here."""
        root = run_folder(self._directory, run_id)
        names = [_FOLDER.fullmatch(each.name) for each in root.iterdir()] if root.is_dir() else []
        return sorted(INITIAL if name[1] == "initial" else int(name[1]) for name in names if name)

    def prune(self, run_id: str, keep: set[int]) -> None:
        """Remove the checkpoints of all rounds but these."""
        for round in set(self.rounds(run_id)) - keep:
            folder = self._folder(run_id, round)
            with disk_errors(f"remove the checkpoint {folder}"):
                going = folder.rename(folder.with_name(_TEMPORARY + folder.name))
                shutil.rmtree(going)  # under its own name a half of it would look like a damaged checkpoint

    def model_file(self, run_id: str, round: int) -> Path:
        """The model alone as a plain safetensors file with state_dict names. StoreError if there is none."""
        path = self._folder(run_id, round) / _MODEL
        if not path.is_file():
            known = ", ".join(map(str, self.rounds(run_id))) or "none"
            raise StoreError(f"run {run_id!r} has no model of round {round}; there are: {known}")
        return path

    def remove_run(self, run_id: str) -> None:
        """Remove all checkpoints of a run, damaged ones too."""
        remove_folder(run_folder(self._directory, run_id), f"remove the checkpoints of run {run_id!r}")

    def _folder(self, run_id: str, round: int) -> Path:
        if round < INITIAL:
            raise StoreError(f"a checkpoint's round is {INITIAL} (the first model) or more; got {round}")
        name = "round-initial" if round == INITIAL else f"round-{round:06d}"
        return run_folder(self._directory, run_id) / name


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename a finished folder to its name, durably. One that had the name is removed after that, or put back."""
    old = target.with_name(_REPLACED + target.name)
    if target.exists():
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    fsync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clear_up(root: Path) -> None:
    """Finish what a killed process began: a replaced folder without its successor comes back, the rest is removed."""
    for old in root.glob(f"run-*/{_REPLACED}*"):
        target = old.with_name(old.name.removeprefix(_REPLACED))
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    for leftover in root.glob(f"run-*/{_TEMPORARY}*"):
        shutil.rmtree(leftover)


def _memory_file(symbol: str) -> str:
    return f"memory-{check_id(symbol, 'the name of a memory')}.safetensors"


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    memory = {_memory_file(symbol): tensors for symbol, tensors in checkpoint.memory.items()}
    bundles = {_MODEL: checkpoint.model, **memory}
    # Side by side: while one file is forced onto the disk, another is written.
    with ThreadPoolExecutor(len(bundles)) as pool:
        entries = list(pool.map(lambda name: write_tensors(folder / name, bundles[name]), bundles))
    files = dict(zip(bundles, entries, strict=True))
    write_meta(folder, {"memory": list(checkpoint.memory), "files": files, "facts": dict(checkpoint.facts)})


def _read(folder: Path) -> Checkpoint:
    meta = read_meta(folder)
    model = read_tensors(folder / _MODEL, meta["files"][_MODEL])
    names = {symbol: _memory_file(symbol) for symbol in meta["memory"]}
    memory = {symbol: read_tensors(folder / name, meta["files"][name]) for symbol, name in names.items()}
    return Checkpoint(model, memory, meta["facts"])
