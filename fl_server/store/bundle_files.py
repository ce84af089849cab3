"""The files of one checkpoint: tensors as safetensors, each with its BLAKE3 digest in a meta.json. No pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fl_common.files import fsync_path
from fl_common.settings import parse_json
from fl_server.store.errors import StoreError
from fl_server.store.files import disk_error, disk_errors, file_digest

FORMAT = 1
"""The format of a checkpoint, in its meta.json."""
_META = "meta.json"
_LENGTH_BYTES = 8
"""Bytes of the length of a safetensors header, at the beginning of its file."""
_NO_METADATA: Mapping[str, str] = MappingProxyType({})
_ERRNO = re.compile(r"(?:os error |code: )(\d+)")


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
    return {"digest": _text(file_digest(path)), "size_bytes": path.stat().st_size, "tensors": list(tensors)}


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
            size, digest = path.stat().st_size, _text(file_digest(path))
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
    (folder / _META).write_bytes(json.dumps({**content, "digest": _meta_digest(content)}, indent=1).encode())
    fsync_path(folder / _META)


def read_meta(folder: Path) -> dict[str, Any]:
    """The folder's meta.json. Raises Damaged if it is torn, and StoreError if its format is unknown."""
    with disk_errors(f"read {folder / _META}"):
        try:
            meta: dict[str, Any] = parse_json((folder / _META).read_bytes())
            digest = meta.pop("digest")
        except FileNotFoundError as error:
            raise Damaged(f"{_META} is missing") from error
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise Damaged(f"{_META} is torn: {error}") from error
    if digest != _meta_digest(meta):
        raise Damaged(f"{_META} does not have the digest that it names")
    if (format_ := meta.get("format")) != FORMAT:
        raise StoreError(
            f"{folder} has checkpoint format {format_!r}; this program knows {FORMAT}: start the version that wrote it"
        )
    return meta


def _meta_digest(meta: Mapping[str, Any]) -> str:
    return _text(blake3(json.dumps(meta, sort_keys=True).encode()).digest())


def _text(digest: bytes) -> str:
    return f"blake3:{digest.hex()}"


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
