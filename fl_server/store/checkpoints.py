"""Committed models on disk: written under a temporary name, fsynced, renamed. A restart uses the newest valid one.

    run-ID/round-000012/model.safetensors      the whole state_dict: trainable parameters, buffers and frozen parts;
                                               without frozen parts if clients have them, with their digest
                        master.safetensors     float32 of the parameters of a lower precision, if there are any
                        memory-Delta.safetensors    one file for each model-sized memory of the algorithm
                        averaged.safetensors   the whole state_dict of the averaged model, if the run has one,
                        sum-a.f64              and the float64 sums that it is made of
                        meta.json              facts, and each file's digest and order of tensors

    run-ID/start.safetensors                   the file that `initial_model` meant, if the run has one

`round-initial` is the model before round 0. A folder with wrong digests is renamed to `*.damaged`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import structlog
import torch
from blake3 import blake3

from algorithms.averaging import Averaging
from fl_common.files import atomic_writer, fsync_path, make_folders
from fl_server.store.checkpoint_files import (
    AveragedModel,
    Damaged,
    StoredCheckpoints,
    check_file,
    read_meta,
    read_tensors,
    write_meta,
    write_tensors,
)
from fl_server.store.errors import NoCheckpoint, StoreError, check_id, disk_errors, remove_folder, run_folder
from fl_server.store.objects.bucket import DamagedObject
from fl_server.store.objects.files import StoredFiles

log = structlog.get_logger(__name__)

INITIAL = -1
"""The round number of a run's first model."""

FROZEN = "frozen"
"""Fact of a checkpoint, and of its file: digest of the frozen parameters that it leaves out, as clients have them."""

HOLDS = "holds"
"""The key in the header of a model's file that tells which model of a run with an averaged one the file has."""
COMMITTED, AVERAGED = "committed", "averaged"
"""The models of a round: the one that clients train from, and the mean of those up to it."""

_TEMPORARY = ".part-"
_REPLACED = ".replaced-"
START = "start.safetensors"
"""File in a run's folder: what it was told to start from."""
_MODEL = "model.safetensors"
_AVERAGED = "averaged.safetensors"
_MASTER = "master.safetensors"
_FOLDER = re.compile(r"round-(initial|\d{6,})")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that a run needs to continue after a round."""

    model: Tensors
    """Name -> tensor of the whole state_dict: trainable parameters, buffers and frozen parts.

    Without frozen parts if the facts have the digest FROZEN of those that clients have themselves."""
    memory: Mapping[str, Tensors] = field(default_factory=dict)
    """The algorithm's model-sized state by the paper's symbol, such as "Delta"."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: config digest, seed, learning rate and others; `save` adds "round"."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Second names of tied weights -> their name in `model`. The file has a copy under each name, so that it loads
    strictly into the task's model. They are not read again."""
    master: Tensors = field(default_factory=dict)
    """The server's float32 of the parameters that have a lower precision in `model`."""
    averaged: AveragedModel | None = None
    """The averaged model after the round, if the run has one then."""

    @property
    def state_dict(self) -> Tensors:
        """The model under all names of its state_dict. Tied weights share memory."""
        return with_tied(self.model, self.tied)


def with_tied(model: Tensors, tied: Mapping[str, str]) -> Tensors:
    """A model under all names of its state_dict."""
    return {**model, **{name: model[of] for name, of in tied.items()}}


def _named_frozen(checkpoint: Checkpoint) -> dict[str, str]:
    return {FROZEN: checkpoint.facts[FROZEN]} if FROZEN in checkpoint.facts else {}


class Checkpoints:
    """The checkpoints of all runs in one directory, for one writer. Blocking; raises StoreError and StoreFull."""

    def __init__(
        self,
        directory: Path | str,
        writers: Callable[[int], Executor] = ThreadPoolExecutor,
        files: StoredFiles | None = None,
    ) -> None:
        """writers: makes the threads that write the files of one checkpoint, by their number.

        files: the object store that has the checkpoints, if there is one. Then the directory has copies: a checkpoint
        that is only there does not count.
        """
        self._directory, self._writers = Path(directory), writers
        self._files = None if files is None else StoredCheckpoints(files, self._directory)
        with disk_errors(f"open the checkpoints in {self._directory}"):
            make_folders(self._directory, durable=True)
            _clear_up(self._directory)
            # A process may have been killed between a rename and its fsync. This one relies on the names that it finds.
            for folder in (self._directory, *self._directory.glob("run-*")):
                fsync_path(folder)

    def save(self, run_id: str, round: int, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint. When this returns, its folder is complete and durable; if it fails, there is no folder.

        An earlier checkpoint of the round is replaced. A StoreFull leaves the other checkpoints untouched.
        """
        target = self._folder(run_id, round)
        temporary = target.with_name(_TEMPORARY + target.name)
        try:
            with disk_errors(f"save the checkpoint of run {run_id!r} round {round}"):
                make_folders(target.parent, durable=True)
                if temporary.exists():  # left by a failed attempt
                    shutil.rmtree(temporary)
                temporary.mkdir()
                _write(temporary, replace(checkpoint, facts={**checkpoint.facts, "round": round}), self._writers)
                fsync_path(temporary)
                _put_in_place(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        if self._files is not None:
            self._files.put(target)
        return target

    def latest(self, run_id: str) -> Checkpoint | None:
        """The newest valid checkpoint; None if there is none. Damaged newer ones are renamed, with a warning."""
        for round in reversed(self.rounds(run_id)):
            folder = self._folder(run_id, round)
            try:
                return self._read(folder)
            except Damaged as error:
                if self._files is not None:
                    log.warning("checkpoint_damaged", run=run_id, round=round, why=str(error))
                    continue
                kept = folder.with_name(folder.name + ".damaged")
                log.warning("checkpoint_damaged", run=run_id, round=round, why=str(error), kept_as=str(kept))
                remove_folder(kept, f"make room for {kept}")
                with disk_errors(f"put the damaged checkpoint {folder} aside"):
                    folder.rename(kept)
        return None

    def of_round(self, run_id: str, round: int) -> Checkpoint | None:
        """The checkpoint of a round; None if there is none, or if it is damaged."""
        try:
            return self._read(self._folder(run_id, round)) if round in self.rounds(run_id) else None
        except Damaged as error:
            log.warning("checkpoint_damaged", run=run_id, round=round, why=str(error))
            return None

    def rounds(self, run_id: str) -> list[int]:
        """Rounds with a checkpoint, oldest first; INITIAL (-1) for the first model. Digests are not checked."""
        root = run_folder(self._directory, run_id)
        with disk_errors(f"list the checkpoints of run {run_id!r}"):
            if self._files is not None:
                folders = self._files.folders(root)
            else:
                folders = [folder.name for folder in root.iterdir()] if root.is_dir() else []
        names = [_FOLDER.fullmatch(folder) for folder in folders]
        return sorted(INITIAL if name[1] == "initial" else int(name[1]) for name in names if name)

    def prune(self, run_id: str, keep: set[int]) -> None:
        """Remove the checkpoints of all other rounds."""
        for round in set(self.rounds(run_id)) - keep:
            folder = self._folder(run_id, round)
            if self._files is not None:
                self._files.remove(folder)
                remove_folder(folder, f"remove the checkpoint {folder}")
                continue
            with disk_errors(f"remove the checkpoint {folder}"):
                going = folder.rename(folder.with_name(_TEMPORARY + folder.name))
                shutil.rmtree(going)  # under its own name, a half-removed folder would look like a damaged checkpoint

    def open_model(self, run_id: str, round: int, *, averaged: bool = False) -> FileIO:
        """A model alone, a plain safetensors file with state_dict names, open for reading. The caller closes it.

        It can be read to its end although its checkpoint is removed. averaged: the averaged model, if there is one.
        Raises NoCheckpoint.
        """
        path = self._folder(run_id, round) / (_AVERAGED if averaged else _MODEL)
        try:
            if self._files is not None:
                self._files.bring(path)
            with disk_errors(f"open {path}"):
                return path.open("rb", buffering=0)
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise
        rounds = self.rounds(run_id)
        known = ", ".join("the first model" if one == INITIAL else str(one) for one in rounds) or "none"
        wanted = "first model" if round == INITIAL else f"{'averaged ' if averaged else ''}model of round {round}"
        raise NoCheckpoint(f"run {run_id!r} has no {wanted}; there are: {known}")

    def keep_start(self, run_id: str, file: FileIO) -> bytes:
        """Keep a copy of the open safetensors file that a run starts from, for as long as the run. Returns its digest.

        Durable. A copy of an earlier call is replaced.
        """
        path, hasher = self.start(run_id), blake3()
        with disk_errors(f"keep the initial model of run {run_id!r}"):
            make_folders(path.parent, durable=True)
            with atomic_writer(path, part=path.with_suffix(".part")) as kept:
                while block := file.read(1 << 20):
                    hasher.update(block)
                    kept.write(block)
        if self._files is not None:
            self._files.put_file(path)
        return hasher.digest()

    def start(self, run_id: str) -> Path:
        """The path of that copy, which a run without an `initial_model` does not have."""
        path = start_file(self._directory, run_id)
        if self._files is not None:
            self._files.bring(path)
        return path

    def remove_run(self, run_id: str) -> None:
        """Remove all checkpoints of a run, damaged ones too, and what it started from."""
        folder = run_folder(self._directory, run_id)
        if self._files is not None:
            self._files.remove(folder)
        remove_folder(folder, f"remove the checkpoints of run {run_id!r}")

    def _read(self, folder: Path) -> Checkpoint:
        """A checkpoint. Raises Damaged. With an object store a damaged copy is replaced once."""
        if self._files is None:
            return _read(folder)
        try:
            self._files.bring_all(folder)
            return _read(folder)
        except Damaged:
            remove_folder(folder, f"remove the damaged copy {folder}")
        except DamagedObject as error:
            raise Damaged(str(error)) from error
        self._files.bring_all(folder)
        return _read(folder)

    def _folder(self, run_id: str, round: int) -> Path:
        if round < INITIAL:
            raise StoreError(f"a checkpoint's round is {INITIAL} (the first model) or more; got {round}")
        name = "round-initial" if round == INITIAL else f"round-{round:06d}"
        return run_folder(self._directory, run_id) / name


def start_file(directory: Path, run_id: str) -> Path:
    """The path of the file that a run started from, in the directory of checkpoints."""
    return run_folder(directory, run_id) / START


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename a finished folder to its final name, durably. An older folder of that name is removed, or restored."""
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
    """Finish the work of a killed process: restore a replaced folder without a successor, remove the rest."""
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


def _write(folder: Path, checkpoint: Checkpoint, writers: Callable[[int], Executor]) -> None:
    memory = {_memory_file(symbol): tensors for symbol, tensors in checkpoint.memory.items()}
    master = {_MASTER: checkpoint.master} if checkpoint.master else {}
    bundles = {_MODEL: checkpoint.state_dict, **master, **memory}
    # In parallel: while one file is synced, another is written.
    with writers(len(bundles)) as pool:
        metadata = {_MODEL: {**_named_frozen(checkpoint), **({HOLDS: COMMITTED} if checkpoint.averaged else {})}}
        entries = list(
            pool.map(lambda name: write_tensors(folder / name, bundles[name], metadata.get(name, {})), bundles)
        )
    files = dict(zip(bundles, entries, strict=True))
    files[_MODEL]["tensors"] = list(checkpoint.model)
    meta = {"memory": list(checkpoint.memory), "files": files, "facts": dict(checkpoint.facts)}
    if checkpoint.averaged is not None:
        files |= _write_averaged(folder, checkpoint, checkpoint.averaged)
        meta["averaging"] = asdict(checkpoint.averaged.rule)
    write_meta(folder, meta)


def _write_averaged(folder: Path, checkpoint: Checkpoint, averaged: AveragedModel) -> dict[str, Any]:
    """The sums first: the model is read from them."""
    sums = averaged.write_sums(folder)
    model = {**checkpoint.model, **averaged.values(folder)}
    metadata = {HOLDS: AVERAGED, **_named_frozen(checkpoint)}
    return {**sums, _AVERAGED: write_tensors(folder / _AVERAGED, with_tied(model, checkpoint.tied), metadata)}


def _read_averaged(folder: Path, meta: Mapping[str, Any], model: Tensors) -> AveragedModel | None:
    if "averaging" not in meta:
        return None
    averaged = AveragedModel(Averaging(**meta["averaging"]), meta["facts"]["round"], model, folder)
    for name in (_AVERAGED, *averaged.files):
        check_file(folder / name, meta["files"][name])
    return averaged


def _read(folder: Path) -> Checkpoint:
    meta = read_meta(folder)
    model = read_tensors(folder / _MODEL, meta["files"][_MODEL])
    names = {symbol: _memory_file(symbol) for symbol in meta["memory"]}
    memory = {symbol: read_tensors(folder / name, meta["files"][name]) for symbol, name in names.items()}
    master = read_tensors(folder / _MASTER, meta["files"][_MASTER]) if _MASTER in meta["files"] else {}
    return Checkpoint(model, memory, meta["facts"], master=master, averaged=_read_averaged(folder, meta, model))
