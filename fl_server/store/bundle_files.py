"""The files of one checkpoint: tensors as safetensors, each with its BLAKE3 digest in a meta.json. No pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fl_server.store.base import StoreError
from fl_server.store.files import disk_error, disk_errors, fsync_path, write_durably

FORMAT = 1
_META = "meta.json"
_BLOCK = 1 << 20
_ERRNO = re.compile(r"(?:os error |code: )(\d+)")


class Damaged(Exception):
    """A checkpoint's files are not what was written."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a safetensors file and fsync it; returns what `read_tensors` needs to trust it.

    The library writes from the tensors' own memory. It sorts them by type and name, so their order is kept apart.
    """
    with _library_errors(path, "write"):
        save_file(_separate(tensors), path, metadata={"format": "pt"})
    fsync_path(path)
    return {"digest": _digest(path), "size_bytes": path.stat().st_size, "tensors": list(tensors)}


def read_tensors(path: Path, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a file, in the order they were written in. Raises Damaged unless size and digest are `entry`'s."""
    with disk_errors(f"read {path}"):
        try:
            size, digest = path.stat().st_size, _digest(path)
        except FileNotFoundError as error:
            raise Damaged(f"{path.name} is missing") from error
    if (size, digest) != (entry["size_bytes"], entry["digest"]):
        raise Damaged(
            f"{path.name} should be {entry['size_bytes']} bytes, {entry['digest']}; is {size} bytes, {digest}"
        )
    with _library_errors(path, "read"), safe_open(path, framework="pt") as file:
        # The library hands out views of a mapped file; a copy stays good when the file is removed or cut.
        return {name: file.get_tensor(name).clone() for name in entry["tensors"]}


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    """Write the folder's meta.json and fsync it. StoreError if a value is not JSON."""
    try:
        content = json.loads(json.dumps({"format": FORMAT, **meta}))
    except (TypeError, ValueError) as error:
        raise StoreError(f"a checkpoint's facts must be JSON values: {error}") from error
    write_durably(folder / _META, json.dumps({**content, "digest": _meta_digest(content)}, indent=1).encode())


def read_meta(folder: Path) -> dict[str, Any]:
    """The folder's meta.json. Raises Damaged if it is torn, StoreError if it has a format that is not known here."""
    with disk_errors(f"read {folder / _META}"):
        try:
            meta: dict[str, Any] = json.loads((folder / _META).read_bytes())
            digest = meta.pop("digest")
        except FileNotFoundError as error:
            raise Damaged(f"{_META} is missing") from error
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise Damaged(f"{_META} is torn: {error}") from error
    if digest != _meta_digest(meta):
        raise Damaged(f"{_META} does not have the digest that it names")
    if meta.get("format") != FORMAT:
        raise StoreError(
            f"{folder} has checkpoint format {meta.get('format')!r}; this program knows {FORMAT}: start the version "
            "that wrote it"
        )
    return meta


def _meta_digest(meta: Mapping[str, Any]) -> str:
    return f"blake3:{blake3(json.dumps(meta, sort_keys=True).encode()).hexdigest()}"


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors of which no two share memory: tied weights are copied, for the format has no aliases."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        separate[name] = plain.clone() if plain.numel() and plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return separate


def _digest(path: Path) -> str:
    hasher = blake3()
    block = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
    return f"blake3:{hasher.hexdigest()}"


@contextmanager
def _library_errors(path: Path, doing: str) -> Iterator[None]:
    """The library tells a full disk from other errors only in its text, where the system's error number stands."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        number = getattr(error, "errno", None)
        if number is None and (found := _ERRNO.search(str(error))):
            number = int(found[1])
        raise disk_error(f"{doing} {path}", number, error) from error
