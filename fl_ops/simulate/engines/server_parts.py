"""Parts of the server's work that any process with the run's server engine can do, with the same bits.

The data and results of a part that are large are in files: a part is sent to another process in a message.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import algorithms as fl
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.snapshot import Snapshot
from fl_server.aggregation.updates import read_block
from fl_tasks.evaluation import BatchSums
from protos.codec import Entry, unpack


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """The batches of the held-out examples from `first` up to `last`."""

    model: Path
    """The model's parameters and buffers, packed by the engine's layout."""
    first: int
    last: int

    def result(self, server: Engine) -> list[BatchSums]:
        """The metrics of each batch. Raises TaskError."""
        tensors = unpack(bytearray(self.model.read_bytes()), server.layout)
        trainable = {entry.name for entry in server.layout.entries if entry.trainable}
        parameters = {name: tensor for name, tensor in tensors.items() if name in trainable}
        buffers = {name: tensor for name, tensor in tensors.items() if name not in trainable}
        return server.evaluate_part(Snapshot(-1, fl.ServerState(parameters, {}), buffers), self.first, self.last)


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor, or of several neighbours, and the place of its sums in the output."""

    entry: Entry
    start: int
    count: int
    output: int
    """Offset in bytes within a row."""


@dataclass(frozen=True, slots=True)
class SumPart:
    """Weighted sums of some blocks of the updates."""

    updates: Sequence[Path]
    rows: Sequence[Sequence[float]]
    """Coefficients of the updates, for each sum."""
    pieces: Sequence[Piece]
    output: Path
    """A file of the final size: all sums, one row after the other."""
    row_bytes: int

    def result(self, server: Engine) -> list[BatchSums]:
        """Write the sums. Raises StoreError, LayoutError: a file is gone or too short."""
        del server
        descriptor = os.open(self.output, os.O_WRONLY)
        try:
            for piece in self.pieces:
                blocks = (read_block(path, piece.entry, piece.start, piece.count) for path in self.updates)
                for row, total in enumerate(fl.weighted_sums(blocks, self.rows)):
                    os.pwrite(descriptor, total.numpy().data, row * self.row_bytes + piece.output)
        finally:
            os.close(descriptor)
        return []


Part = EvaluationPart | SumPart
PartResult = list[BatchSums]
