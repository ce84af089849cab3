"""The partition file. It is made once and installed on every device, so that a device's shard never changes."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_tasks.data.shard import Shard, checked_indices
from fl_tasks.errors import TaskError
from fl_tasks.partitioning.spec import PartitionSpec

FORMAT = "impetus-partition-1"


@dataclass(frozen=True)
class Partition:
    """A partition and the spec that it was made from."""

    spec: PartitionSpec
    num_examples: int
    """Size of the partitioned training set."""
    parts: list[Tensor]
    """Indices of each client, 0 to clients - 1."""

    def shard(self, client: int) -> Shard:
        """The shard of one client. Raises TaskError for an unknown client."""
        if not 0 <= client < len(self.parts):
            raise TaskError(f"expected a client from 0 to {len(self.parts) - 1} of this partition, got {client}")
        return Shard(self.parts[client])


def save_partition(path: Path, partition: Partition) -> None:
    """Write the partition as JSON, atomically."""
    content = {
        "spec": asdict(partition.spec),
        "num_examples": partition.num_examples,
        "parts": [part.tolist() for part in partition.parts],
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps({"format": FORMAT, "digest": _digest(content), **content}), encoding="utf-8")
    temporary.replace(path)


def load_partition(path: Path, num_examples: int) -> Partition:
    """Read a partition of a training set of `num_examples`.

    Raises TaskError if the file is missing, invalid, changed, truncated, or made for other data.
    """
    data = _read(path)
    content = {key: value for key, value in data.items() if key not in ("format", "digest")}
    if data.get("digest") != _digest(content):
        raise TaskError(f"the partition {path} was changed or cut after it was made: its digest differs; copy it again")
    try:
        spec = PartitionSpec(**content["spec"])
        parts = [torch.tensor(part, dtype=torch.int64) for part in content["parts"]]
        partition = Partition(spec, content["num_examples"], parts)
    except (KeyError, TypeError, RuntimeError, TaskError) as error:
        raise TaskError(f"the partition {path} cannot be used: {error}; make it again") from error
    if partition.num_examples != num_examples:
        raise TaskError(
            f"the partition {path} is for {partition.num_examples} examples, the training set has {num_examples}: it"
            " was made for other data"
        )
    _check_parts(path, partition)
    return partition


def load_indices(path: Path, num_examples: int) -> Tensor:
    """Read an index file: one whole number a line, or an .npy file of whole numbers; sorted.

    Raises TaskError if the file cannot be read, is empty, names an example twice, or names one that is not there.
    """
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:  # NumPy leaves a broken one open
                numbers = np.load(file, allow_pickle=False)
        else:
            numbers = np.array([int(line) for line in path.read_text(encoding="utf-8-sig").split()], dtype=np.int64)
    except OSError as error:
        raise TaskError(f"the index file {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # numpy raises errors of many types for a file that is none of its own
        raise TaskError(f"expected whole numbers, one a line, in the index file {path}: {error}") from error
    if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
        raise TaskError(
            f"expected one whole number for each example in the index file {path}, got {numbers.dtype} of shape"
            f" {list(numbers.shape)}"
        )
    if len(unique := np.unique(numbers)) != len(numbers):
        raise TaskError(f"the index file {path} names an example more than once")
    return checked_indices(torch.from_numpy(unique.astype(np.int64)), num_examples)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TaskError(f"the partition {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"expected a partition in {path}, got a file that is not whole JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        came = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise TaskError(f'expected a partition of format "{FORMAT}" in {path}, got {came!r}')
    return data


def _check_parts(path: Path, partition: Partition) -> None:
    if len(partition.parts) != partition.spec.clients:
        raise TaskError(f"the partition {path} has {len(partition.parts)} parts for {partition.spec.clients} clients")
    if any(part.dim() != 1 for part in partition.parts):
        raise TaskError(f"expected a list of whole numbers for each client in the partition {path}, got nested lists")
    assigned = torch.cat([*partition.parts, torch.zeros(0, dtype=torch.int64)])
    if len(assigned) and not 0 <= int(assigned.min()) <= int(assigned.max()) < partition.num_examples:
        raise TaskError(
            f"the partition {path} names examples {int(assigned.min())} to {int(assigned.max())}, outside 0 to"
            f" {partition.num_examples - 1}"
        )
    if len(torch.unique(assigned)) != len(assigned):
        raise TaskError(f"the partition {path} gives an example to more than one client")


def _digest(content: dict[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
