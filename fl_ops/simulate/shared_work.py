"""The server's work of a simulated run, shared among the processes of its engine where that is possible.

Each part has the bits that one process would compute, and parts are put together in order. So the number of processes
changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import algorithms as fl
from algorithms.precision import master_dtype
from fl_ops.simulate.engines.engine import EvaluationPart, LocalEngine, Piece, SumPart
from fl_server.aggregation import reduction
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.snapshot import Snapshot
from fl_server.aggregation.updates import BLOCK_BYTES, Source, joined, neighbours
from fl_tasks.evaluation import totals_of
from protos.codec import Entry, Layout, pack

LEAST_BYTES = 8 << 20
"""Updates with fewer bytes in all are summed by one process: the messages would take longer."""


class SharedWork:
    """Evaluations and sums. What cannot be shared is done by this process."""

    def __init__(self, server: Engine, engine: LocalEngine, processes: int, folder: Path) -> None:
        """processes: of the engine; 1: nothing is shared. folder: for the files of parts."""
        self._server, self._engine, self._processes = server, engine, processes
        self._model, self._output = folder / "evaluated-model", folder / "sums"
        placed = [payload.placed for shape in server.shapes for payload in shape.payloads]
        self._payloads = [(layout, frozenset(layout.entries)) for layout in placed]
        self._known: list[tuple[Layout, Sequence[Source], Sequence[Sequence[float]], list[fl.Tensors]]] = []

    def evaluate(self, snapshot: Snapshot) -> dict[str, float]:
        """The task's metrics on the server's held-out examples. Raises TaskError."""
        count = self._server.model.in_process.batches() if self._processes > 1 else None
        if count is None or count < self._processes:
            return self._server.model.evaluate(snapshot)
        self._model.write_bytes(pack({**snapshot.parameters, **snapshot.buffers}, self._server.layout))
        parts = [EvaluationPart(self._model, first, last) for first, last in _cuts(count, self._processes)]
        if (results := self._engine.share(parts)) is None:
            return self._server.model.evaluate(snapshot)
        examples = len(self._server.model.in_process.held_out())
        return self._server.model.in_process.finished(
            totals_of((batch for part in results for batch in part), examples)
        )

    def sum_updates(
        self, sources: Sequence[Source], layout: Layout, rows: Sequence[Sequence[float]]
    ) -> list[fl.Tensors]:
        """See `reduction.sum_updates`. After the first tensors of a payload, the others are there already."""
        sums = self._sums(sources, layout, rows) if self._processes > 1 else None
        if sums is None:
            return reduction.sum_updates(sources, layout, rows)
        wanted = [entry.name for entry in layout.entries if entry.trainable]
        return [{name: row[name] for name in wanted} for row in sums]

    def forget(self) -> None:
        """Release the sums of a round."""
        self._known.clear()

    def _sums(
        self, sources: Sequence[Source], layout: Layout, rows: Sequence[Sequence[float]]
    ) -> list[fl.Tensors] | None:
        """The sums of the whole payload that the layout is of. None: they cannot be shared."""
        payload = next((whole for whole, entries in self._payloads if entries.issuperset(layout.entries)), None)
        paths = [source for source in sources if isinstance(source, Path)]
        if payload is None or len(paths) < len(sources) or len(paths) * payload.size_bytes < LEAST_BYTES:
            return None
        for known, of, by, sums in self._known:
            if known is payload and of == sources and by == rows:
                return sums
        shared = self._share(paths, payload, rows)
        if shared is not None:
            self._known.append((payload, sources, rows, shared))
        return shared

    def _share(
        self, paths: Sequence[Path], payload: Layout, rows: Sequence[Sequence[float]]
    ) -> list[fl.Tensors] | None:
        groups = neighbours([entry for entry in payload.entries if entry.trainable])
        pieces, row_bytes = _pieces([joined(group) for group in groups])
        with self._output.open("wb") as file:
            file.truncate(row_bytes * len(rows))
        parts = [
            SumPart(paths, rows, pieces[first:last], self._output, row_bytes)
            for first, last in _cuts(len(pieces), min(self._processes, len(pieces)))
        ]
        if self._engine.share(parts) is None:
            return None
        whole = np.fromfile(self._output, np.uint8)
        return [_tensors(torch.from_numpy(whole[row * row_bytes :][:row_bytes]), groups) for row in range(len(rows))]


def _pieces(entries: Sequence[Entry]) -> tuple[list[Piece], int]:
    """The blocks of tensors, and the bytes of one sum of all. Offsets are multiples of 8."""
    pieces: list[Piece] = []
    output = 0
    for entry in entries:
        size, per_block = master_dtype(entry.dtype).itemsize, max(1, BLOCK_BYTES // entry.dtype.itemsize)
        pieces += [
            Piece(entry, start, min(per_block, entry.numel - start), output + start * size)
            for start in range(0, entry.numel, per_block)
        ]
        output += -(-entry.numel * size // 8) * 8
    return pieces, output


def _tensors(row: torch.Tensor, groups: Sequence[Sequence[Entry]]) -> fl.Tensors:
    """One sum by tensor name. row: its bytes."""
    sums: fl.Tensors = {}
    output = 0
    for group in groups:
        entry = joined(group)
        dtype = master_dtype(entry.dtype)
        size = entry.numel * dtype.itemsize
        values = row[output : output + size].view(dtype)
        sums.update(reduction.apart(values.view(entry.shape) if len(group) == 1 else values, group))
        output += -(-size // 8) * 8
    return sums


def _cuts(count: int, parts: int) -> Iterator[tuple[int, int]]:
    """(first, last) of so many parts of about equal length."""
    return pairwise(count * part // parts for part in range(parts + 1))
