"""The files of one checkpoint: tensors as safetensors, each with its BLAKE3 digest in a meta.json. No pickle.

In an object store all files of a checkpoint count together, and its folder on the disk is a copy.

The averaged model of a run has float64 sums in files, made block by block, so that no sum is ever whole in memory. The
sums of a round are made from those of the round before while its checkpoint is written. A simulation has them in
memory, where its model is. The averaged model has the mean of the parameters and of the floating buffers, and the
latest integer buffers.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from algorithms.averaging import Averaging, Term, mean_of, stepped
from fl_common.files import fsync_path
from fl_common.settings import parse_json
from fl_server.store.errors import StoreError, disk_error, disk_errors, file_digest, remove_folder
from fl_server.store.objects.files import StoredFiles
from protos.digests import digest_text

FORMAT = 1
"""The format of a checkpoint, in its meta.json."""
META = "meta.json"
"""File of a checkpoint: its facts, and the digest of each other file."""
_LENGTH_BYTES = 8
"""Bytes of the length of a safetensors header, at the beginning of its file."""
_NO_METADATA: Mapping[str, str] = MappingProxyType({})
_ERRNO = re.compile(r"(?:os error |code: )(\d+)")


BLOCK = 1 << 16
"""Entries of a block."""
Sums = Path | Mapping[str, Mapping[str, torch.Tensor]]
"""The sums of an averaged model: a folder of files, or tensors by the sum's name and the model's."""


class Damaged(Exception):
    """The files of a checkpoint differ from those written."""


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = _NO_METADATA
) -> dict[str, Any]:
    """Write a safetensors file and fsync it; returns its entry, which `read_tensors` checks.

    metadata: of the file's header.

    The library writes from the tensors' own memory. It sorts them by type and name, so the entry has their order.
    """
    with _library_errors(path, "write"):
        save_file(separate(tensors), path, metadata={"format": "pt", **metadata})
        if metadata:
            _sort_metadata(path)
    fsync_path(path)
    return {"digest": digest_text(file_digest(path)), "size_bytes": path.stat().st_size, "tensors": list(tensors)}


def _sort_metadata(path: Path) -> None:
    """Put the metadata of a file in order: the library's order changes from file to file, and with it the digest."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > length:
            raise StoreError(f"the header of {path} has another length than the library gave it")
        file.seek(_LENGTH_BYTES)
        file.write(text.ljust(length))


def read_tensors(path: Path, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a file, in their original order. Raises Damaged if size or digest differ from the entry."""
    check_file(path, entry)
    with _library_errors(path, "read"), safe_open(path, framework="pt") as file:
        # The library returns views of a mapped file; a copy stays valid when the file is removed or cut.
        return {name: file.get_tensor(name).clone() for name in entry["tensors"]}


def check_file(path: Path, entry: Mapping[str, Any]) -> None:
    """Raises Damaged if a file's size or digest differ from its entry."""
    with disk_errors(f"read {path}"):
        try:
            size, digest = path.stat().st_size, digest_text(file_digest(path))
        except FileNotFoundError as error:
            raise Damaged(f"{path.name} is missing") from error
    if (size, digest) != (entry["size_bytes"], entry["digest"]):
        raise Damaged(
            f"{path.name} should be {entry['size_bytes']} bytes, {entry['digest']}; is {size} bytes, {digest}"
        )


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    """Write the folder's meta.json and fsync it. Raises StoreError if a value is not JSON."""
    try:
        content = json.loads(json.dumps({"format": FORMAT, **meta}))
    except (TypeError, ValueError) as error:
        raise StoreError(f"a checkpoint's facts must be JSON values: {error}") from error
    (folder / META).write_bytes(json.dumps({**content, "digest": _meta_digest(content)}, indent=1).encode())
    fsync_path(folder / META)


def read_meta(folder: Path) -> dict[str, Any]:
    """The folder's meta.json. Raises Damaged if it is torn, and StoreError if its format is unknown."""
    with disk_errors(f"read {folder / META}"):
        try:
            meta: dict[str, Any] = parse_json((folder / META).read_bytes())
            digest = meta.pop("digest")
        except FileNotFoundError as error:
            raise Damaged(f"{META} is missing") from error
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise Damaged(f"{META} is torn: {error}") from error
    if digest != _meta_digest(meta):
        raise Damaged(f"{META} does not have the digest that it names")
    if (format_ := meta.get("format")) != FORMAT:
        raise StoreError(
            f"{folder} has checkpoint format {format_!r}; this program knows {FORMAT}: start the version that wrote it"
        )
    return meta


def _meta_digest(meta: Mapping[str, Any]) -> str:
    return digest_text(blake3(json.dumps(meta, sort_keys=True).encode()).digest())


def separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors without shared memory: tied weights are copied, because the format has no aliases."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        separate[name] = plain.clone() if plain.numel() and plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return separate


@contextmanager
def _library_errors(path: Path, doing: str) -> Iterator[None]:
    """Translate the library's errors. Their text has the system's error number, the only sign of a full disk."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        number = getattr(error, "errno", None)
        if number is None and (match := _ERRNO.search(str(error))):
            number = int(match[1])
        raise disk_error(f"{doing} {path}", number, error) from error


@dataclass(frozen=True, slots=True)
class AveragedModel:
    """The averaged model after a round."""

    rule: Averaging
    round: int
    model: Mapping[str, torch.Tensor]
    """The committed model as clients get it: parameters and buffers."""
    sums: Sums | None = None
    """Those of this round. None: they are not made yet."""
    before: Sums | None = None
    """Those of the round before; None if there are none."""

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
                if isinstance(self.sums, Path):
                    shutil.copyfile(self.sums / path.name, path)
                    digest = file_digest(path)
                elif self.sums is None:
                    digest = _write(path, self._made(name, term, _blocks(self.model)))
                else:
                    digest = _write(path, self.sums[name].values())
                fsync_path(path)
                entries[path.name] = {"digest": digest_text(digest), "size_bytes": path.stat().st_size}
        return entries

    def in_memory(self) -> AveragedModel:
        """The same with its sums in memory, on the device of the model, as a simulation has them."""
        floating = {name: tensor for name, tensor in self.model.items() if tensor.is_floating_point()}
        sums = {
            name: dict(zip(floating, self._made(name, term, _wholes(self.model)), strict=True))
            for name, term in self.rule.terms(self.round).items()
        }
        return replace(self, sums=sums, before=None)

    def values(self, folder: Path | None = None) -> dict[str, torch.Tensor]:
        """The averaged model, each value rounded once to the dtype of the model. In memory of its own.

        folder: with the sums of this round, if they have just been written.
        """
        sums, mean = folder or self.sums, self.rule.mean(self.round)
        if sums is None or mean is None:
            raise RuntimeError("expected the sums of an averaged model, got one whose sums are not made")
        averaged = {name: torch.empty_like(tensor) for name, tensor in self.model.items()}
        for into, total in _beside(_blocks(averaged) if isinstance(sums, Path) else _wholes(averaged), sums, mean.sum):
            into.copy_(mean_of(total, mean, into.dtype))
        for name, tensor in self.model.items():
            if not tensor.is_floating_point():
                averaged[name].copy_(tensor)
        return averaged

    def _made(self, name: str, term: Term, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """A sum of these parts of the model, in parts."""
        if not term.keep:
            yield from (stepped(None, x, term) for x in parts)
        elif self.before is None:
            raise RuntimeError(f"expected the sums of round {self.round - 1}, got none")
        else:
            for x, before in _beside(parts, self.before, name):
                # The sums of the round before may still be in use.
                yield stepped(before.to(x.device, copy=not isinstance(self.before, Path)), x, term)


def file_of(name: str) -> str:
    """The file of a sum."""
    return f"sum-{name}.f64"


def _wholes(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flat views of the floating tensors."""
    return (tensor.view(-1) for tensor in tensors.values() if tensor.is_floating_point())


def _blocks(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """These in blocks."""
    return (block for whole in _wholes(tensors) for block in whole.split(BLOCK))


def _beside(parts: Iterable[torch.Tensor], sums: Sums, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each part with that of a sum. Sums in memory have whole tensors."""
    if not isinstance(sums, Path):
        yield from zip(parts, sums[name].values(), strict=True)
        return
    with disk_errors(f"read {sums / file_of(name)}"), (sums / file_of(name)).open("rb") as file:
        for part in parts:
            raw = bytearray(8 * part.numel())
            if file.readinto(raw) != len(raw):
                raise OSError("the file of a sum is too short")
            yield part, torch.frombuffer(raw, dtype=torch.float64) if raw else torch.empty(0, dtype=torch.float64)


def _write(path: Path, blocks: Iterable[torch.Tensor]) -> bytes:
    """Write a sum. Returns the digest of the file."""
    hasher = blake3()
    with path.open("wb") as file:
        for block in blocks:
            raw = block.cpu().numpy().tobytes()
            hasher.update(raw)
            file.write(raw)
    return hasher.digest()


class StoredCheckpoints:
    """The checkpoints in an object store, copied below one directory.

    Blocking and thread-safe; raises StoreUnavailable.
    """

    def __init__(self, files: StoredFiles, directory: Path) -> None:
        self._files, self._directory = files, directory
        self._bringing = threading.Lock()
        self._newest: dict[Path, Path] = {}
        """The latest checkpoint of each run that was written or read: its copy stays, because its sums may be read."""

    def folders(self, run: Path) -> list[str]:
        """Names of the checkpoints of a run that count."""
        names = (name.rpartition("/") for name in self._files.names(self._files.name(run)))
        return sorted({Path(folder).name for folder, _, file in names if file == META})

    def put(self, folder: Path) -> None:
        """Put a checkpoint. When this returns, it counts and is durable; an older one of its round does not."""
        paths, name = sorted(folder.iterdir()), self._files.name(folder)
        known = set(self._files.names(name)) - {self._files.name(path) for path in paths}
        self._files.put_files(paths)
        for other in known:
            self._files.remove_file(other)
        self._keep(folder)

    def put_file(self, path: Path) -> None:
        """Put one file, durably."""
        self._files.put_files([path])

    def bring(self, path: Path) -> None:
        """Make the copy of a file, unless it is there or does not count. Raises DamagedObject."""
        stored = self._files.find(self._files.name(path))
        with self._bringing:
            if stored is not None and (not path.exists() or path.stat().st_size != stored.size_bytes):
                self._files.fetch(stored, path)

    def bring_all(self, folder: Path) -> None:
        """Make the copies of a checkpoint's files that are missing. Raises DamagedObject."""
        meta = folder / META
        stored = self._files.find(self._files.name(meta))
        if stored is not None and meta.exists() and file_digest(meta) != stored.digest:
            remove_folder(folder, f"remove {folder}, which is not the checkpoint that counts")
        for name in self._files.names(self._files.name(folder)):
            self.bring(self._directory / Path(name).relative_to(self._files.name(self._directory)))
        self._keep(folder)

    def remove(self, folder: Path) -> None:
        """Let the checkpoints in a folder count no more."""
        self._files.remove(self._files.name(folder))

    def _keep(self, folder: Path) -> None:
        """Keep the copy of a run's newest checkpoint; others may go when there is no room for them."""
        cache, before = self._files.cache, self._newest.get(folder.parent)
        is_newest = before is None or not before.exists() or round_of(folder.name) >= round_of(before.name)
        newest = folder if before is None or is_newest else before
        self._newest[folder.parent] = newest
        cache.forget(newest)
        for other in {folder, before} - {newest, None}:
            if other is not None and other.exists():
                cache.add(other, sum(file.stat().st_size for file in other.iterdir()))


def round_of(folder: str) -> int:
    """The round of a checkpoint by the name of its folder; -1 for the first model."""
    number = folder.removeprefix("round-")
    return int(number) if number.isdecimal() else -1
