"""Norms of updates: how they are read from the disk, with the digest, and the limits that earlier rounds set for them.

A whole update on disk is read once, encoded or not.
For the relative limits only committed rounds are used, so a limit is the same for every update of a round, in any order
of arrival and after any restart. Each vector of an update (its delta, its other payloads, the distance of its buffers
from those sent) has its own history.

The reference of a limit is the largest median of any committed round of the run, so it never shrinks. Training makes
updates shorter, by many orders of magnitude if it converges. A client that joins, that was away, or whose state was
restarted sends updates as long as those at the start of the run. It is no fault of the client.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple

import blake3
import torch
from torch import Tensor

from fl_server.aggregation.updates import EncodedUpdate, Part, PayloadShape, UpdateShape
from fl_server.run_settings.sections import RoundSection
from fl_server.store.database.store import Store
from fl_server.store.records import UpdateRecord
from fl_server.store.spool.part_file import UpdateFile
from protos.codec import Entry
from protos.encodings import EncodingError

READ_BYTES = 1 << 20
"""Bytes in memory at a time; the same values are also there as float64."""
VALUES = 1 << 17
"""Values that are decoded at a time: a multiple of the blocks of every encoding."""
MIN_ROUNDS = 3
"""Committed rounds before there is a limit."""
DELTA = "delta"
BUFFERS = "buffers"
"""Names of two vectors of an update. The others have the names of their payloads."""
FLOOR = 0.01
"""Smallest reference of a delta, as a part of the model's norm: a delta is short in a run that starts at an optimum."""
FARTHEST = 1e15
"""Multiple of 1 + the norm of what was sent: the longest change, also before other updates are known."""
_A_MAJORITY = 3
"""Fewest updates in which no single one determines the median."""
_POOLED = 9
"""Norms of the latest rounds with fewer updates that are compared together."""
FEWEST = 3
"""Fewest updates that are compared: of two, neither is known to be the wrong one."""
OVERFLOW_TIMES = 100.0
"""Multiple of the median norm from which on an update is blamed for an overflow."""
ALONE = 1e9
"""Norm from which on the only update of a round is blamed for an overflow."""
Culprits = tuple[tuple[str, str], ...]
"""(client, why)."""


class Span(NamedTuple):
    """Bytes [start, end) of a file: values of a tensor, or the gap before one."""

    start: int
    end: int
    entry: int
    """Place of the tensor among the entries."""
    dtype: torch.dtype | None = None
    """The dtype of the values; None: these bytes are not summed."""


def digest_and_norms(path: Path, entries: tuple[Entry, ...]) -> tuple[bytes, list[float]]:
    """BLAKE3-256 of the file, and for each entry, by rising offset, the sum of the squares of its values.

    Sums are made in float64, block by block of the tensor, so no float32 value overflows them and one that is not
    finite makes its sum not finite; 0 for integers and bools. Raises StoreError for a file that is shorter than that.
    """
    hasher, sums = blake3.blake3(), [0.0] * len(entries)
    with UpdateFile(path) as file:
        size = max(file.size_bytes, entries[-1].end if entries else 0)
        buffer = memoryview(bytearray(min(size, READ_BYTES)))
        wide = torch.empty(len(buffer) // 2 + 1, dtype=torch.float64)
        for spans in _reads(_spans(entries, size)):
            start, end = spans[0].start, spans[-1].end
            data = buffer[: end - start]
            file.read_into(start, data)
            hasher.update(data)
            for dtype, alike in groupby(spans, attrgetter("dtype")):
                if dtype is not None:
                    run = list(alike)
                    values = torch.frombuffer(data[run[0].start - start : run[-1].end - start], dtype=dtype)
                    for span, square in zip(run, _squares(values, run, wide), strict=True):
                        sums[span.entry] += square
    return hasher.digest(), sums


def _squares(values: Tensor, run: list[Span], wide: Tensor) -> list[float]:
    """The sum of squares of each of the blocks that the values are of, widened in memory that is there already.

    All together: each call of torch lets go of the interpreter, and waits for it again.
    """
    lengths = [(span.end - span.start) // values.itemsize for span in run]
    blocks = wide[: len(values)].copy_(values).split(lengths)
    return torch.stack([torch.dot(block, block) for block in blocks]).tolist()


def _spans(entries: Sequence[Entry], size: int) -> Iterator[Span]:
    """The whole file, cut into blocks of tensors and what lies between; none is longer than a read."""
    at = 0
    for index, entry in enumerate(entries):
        if not entry.dtype.is_floating_point:
            continue
        yield from _cut(Span(at, entry.offset, index))
        yield from _cut(Span(entry.offset, entry.end, index, entry.dtype))
        at = entry.end
    yield from _cut(Span(at, size, len(entries)))


def _cut(span: Span) -> Iterator[Span]:
    itemsize = 1 if span.dtype is None else span.dtype.itemsize
    step = READ_BYTES // itemsize * itemsize
    for start in range(span.start, span.end, step):
        yield span._replace(start=start, end=min(start + step, span.end))


def _reads(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Spans that are read together: as many as fit."""
    together: list[Span] = []
    for span in spans:
        if together and span.end - together[0].start > READ_BYTES:
            yield together
            together = []
        together.append(span)
    if together:
        yield together


def digest_and_norms_of_encoded(update: EncodedUpdate) -> tuple[bytes, list[float], str]:
    """The results of `digest_and_norms` for an encoded update; and what is wrong with its bytes, empty if nothing is.

    The digest is that of the bytes of the file. Sums are made of the decoded values, and of none after the first wrong
    byte. Raises StoreError for a file that is too short.
    """
    sums = [0.0] * len(update.shape.entries)
    with UpdateFile(update.path) as file:
        reads, wrong = HashedReads(file), ""
        try:
            for entry, part in _parts(update):
                values = update.decoded(part, reads.read).double()
                sums[entry] += float(torch.dot(values, values))
        except EncodingError as error:
            wrong = str(error)
        return reads.digest(), sums, wrong


def _parts(update: EncodedUpdate) -> Iterator[tuple[int, Part]]:
    """All floating tensors in pieces, by rising offset, each with the place of its tensor among the entries."""
    place = 0
    for payload in update.shape.payloads:
        for number, entry in enumerate(payload.layout.entries):
            count = entry.numel if entry.dtype.is_floating_point else 0
            yield from ((place, part) for part in _pieces(payload, number, count))
            place += 1


def _pieces(payload: PayloadShape, number: int, count: int) -> Iterator[Part]:
    return (Part(payload, number, start, min(VALUES, count - start)) for start in range(0, count, VALUES))


class HashedReads:
    """Reads of a file by offsets that do not fall; each byte of it is read and hashed once."""

    def __init__(self, file: UpdateFile) -> None:
        self._file, self._hasher = file, blake3.blake3()
        self._start, self._kept = 0, bytearray()
        """The latest bytes, which may be asked for again, and their offset."""

    def read(self, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset` on; fewer at the end of the file."""
        if offset < self._start:
            raise ValueError(f"expected offsets that do not fall, got {offset} after {self._start}")
        while self._end < min(offset + size, self._file.size_bytes):
            self._advance(offset)
        return memoryview(self._kept)[offset - self._start :][:size]

    def digest(self) -> bytes:
        """BLAKE3-256 of the whole file."""
        while self._end < self._file.size_bytes:
            self._advance(self._end)
        return self._hasher.digest()

    @property
    def _end(self) -> int:
        return self._start + len(self._kept)

    def _advance(self, offset: int) -> None:
        """Read on. Bytes before `offset` are not kept."""
        data = bytearray(min(READ_BYTES, self._file.size_bytes - self._end))
        self._file.read_into(self._end, data)
        self._hasher.update(data)
        dropped = min(offset - self._start, len(self._kept))
        self._start, self._kept = self._start + dropped, self._kept[dropped:] + data


class UpdateContent(NamedTuple):
    """What admission has to know of the bytes of an update."""

    digest: bytes
    """BLAKE3-256 of the file."""
    squares: Sequence[float]
    """The sums for each tensor, by rising offset: the sum of the squares of its values; 0 for integers and bools."""
    wrong: str = ""
    """What is wrong with encoded bytes; empty if nothing is."""


def read_update(update: Path | EncodedUpdate, shape: UpdateShape) -> UpdateContent:
    """Read an update of this shape. Raises StoreError for a file that is too short."""
    if isinstance(update, EncodedUpdate):
        return UpdateContent(*digest_and_norms_of_encoded(update))
    return UpdateContent(*digest_and_norms(update, shape.entries))


@dataclass(frozen=True, slots=True)
class RelativeNorm:
    """A limit on a norm, relative to earlier norms. The default has no limit."""

    times: float = 0.0
    """Multiple of the reference; 0: no limit."""
    reference: float = 0.0
    """Largest median of a committed round, before clipping; 0: not known yet."""
    clips: bool = False
    """Whether a longer vector is scaled down to the limit instead of refused."""
    floor: float = 0.0
    """The reference if the largest median is smaller. It does not apply to clipping."""

    @property
    def limit(self) -> float:
        """The largest norm; 0: no limit."""
        return self.limit_with(self.floor)

    def limit_with(self, floor: float) -> float:
        """`limit` with another floor."""
        if not self.reference:
            return 0.0
        return self.times * (self.reference if self.clips else max(self.reference, floor))


NO_LIMIT = RelativeNorm()


def norms_of(update: UpdateRecord) -> Mapping[str, float]:
    """The norm of each vector of an admitted update."""
    return update.norms or {}


@dataclass(frozen=True, slots=True)
class _VectorHistory:
    """The norms of one vector in committed rounds."""

    rounds: int = 0
    """Rounds with this vector."""
    largest: float = 0.0
    """Largest median of a round."""
    pooled: tuple[float, ...] = ()
    """Latest norms of rounds with too few updates for a median of their own."""

    def after(self, norms: Sequence[float]) -> _VectorHistory:
        """The history with one more round.

        Rounds of one or two updates are compared together, by their lower median: one update alone must not raise a
        limit for the rest of the run.
        """
        if len(norms) >= _A_MAJORITY:
            return _VectorHistory(self.rounds + 1, max(self.largest, median(norms)), self.pooled)
        pooled = (*self.pooled, *norms)[-_POOLED:]
        of_pool = median_low(pooled) if len(pooled) >= _A_MAJORITY else 0.0
        return _VectorHistory(self.rounds + 1, max(self.largest, of_pool), pooled)


class NormHistory:
    """What the relative limits of a run follow from, by vector. Each commit stores it, as text."""

    def __init__(self) -> None:
        self._vectors: dict[str, _VectorHistory] = {}

    def after(self, updates: Iterable[Mapping[str, float]]) -> NormHistory:
        """The history with one more committed round. updates: the norms before clipping, of all its exchanges."""
        by_vector: dict[str, list[float]] = {}
        for norms in updates:
            for vector, norm in norms.items():
                by_vector.setdefault(vector, []).append(norm)
        result = NormHistory()
        result._vectors = {**self._vectors}
        for vector, lengths in by_vector.items():
            result._vectors[vector] = self._vectors.get(vector, _VectorHistory()).after(lengths)
        return result

    def to_text(self) -> str:
        """The limits as JSON, with the exact values."""
        return json.dumps({name: asdict(of) for name, of in sorted(self._vectors.items())}, separators=(",", ":"))

    def put_back(self, text: str) -> None:
        """Become the history that `to_text` wrote."""
        values = json.loads(text) if text else {}
        self._vectors = {
            name: _VectorHistory(of["rounds"], of["largest"], tuple(of["pooled"])) for name, of in values.items()
        }

    def reference(self, vector: str) -> float:
        """The largest median norm of a vector; 0: not known yet."""
        history = self._vectors.get(vector, _VectorHistory())
        return history.largest if history.rounds >= MIN_ROUNDS else 0.0

    def limit(self, section: RoundSection, model_norm: float) -> RelativeNorm:
        """The limit for deltas of the round under way. model_norm: of the trainable parameters that were sent."""
        clips = section.over_relative_norm == "clip"
        times, floor = section.max_relative_norm, FLOOR * model_norm
        return RelativeNorm(times, self.reference(DELTA), clips, floor) if times else NO_LIMIT

    def others(self, section: RoundSection, floor: float) -> Mapping[str, RelativeNorm]:
        """The limits for all other vectors with known norms. floor: of payloads; that of buffers is their own."""
        times, vectors = section.max_relative_payload, self._vectors.keys() - {DELTA}
        return {
            vector: RelativeNorm(times, self.reference(vector), floor=0.0 if vector == BUFFERS else floor)
            for vector in vectors
            if times
        }


def norms_in_ledger(store: Store, run_id: str, round_: int, exchanges: int) -> list[Mapping[str, float]]:
    """The norms of the accepted updates of a round with several exchanges; blocking."""
    return [
        norms_of(update) for exchange in range(exchanges) for update in store.accepted_updates(run_id, round_, exchange)
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """An accepted update and the norms of its vectors."""

    client_id: str
    norms: Mapping[str, float]
    clip_factor: float = 1.0

    def length(self, vector: str) -> float:
        """Norm of a vector as it enters the sums."""
        norm = self.norms.get(vector, 0.0)
        return norm * self.clip_factor if vector == DELTA else norm


def outliers(
    section: RoundSection, history: NormHistory, updates: Sequence[Measured], model_norm: float = 0.0
) -> Culprits:
    """Updates with a vector that is too long relative to the others of the exchange.

    Only before committed rounds give a limit, and only for the mean: robust reducers handle outliers themselves.

    model_norm: of the trainable parameters that were sent.
    """
    if section.reducer != "mean" or len(updates) < FEWEST:
        return ()
    whys: dict[str, str] = {}
    for vector in _vectors(updates):
        times = _times(section, vector)
        usual = median_low(update.length(vector) for update in updates)
        floor = FLOOR * model_norm if vector == DELTA and usual else 0.0
        limit = 0.0 if history.reference(vector) else times * max(usual, floor)
        for update in updates:
            if limit and update.length(vector) > limit:
                whys.setdefault(update.client_id, _why(vector, update.length(vector), limit, times))
    return tuple(whys.items())


def overflow_culprit(updates: Sequence[Measured]) -> Culprits:
    """The update that most exceeds the others, if it is long enough to make a sum overflow; one at a time."""
    worst = OVERFLOW_TIMES
    culprits: Culprits = ()
    for update, vector, usual in _with_usual(updates):
        ratio = update.length(vector) / usual if usual else math.inf
        if update.length(vector) and ratio > worst:
            why = f"the sum is not finite; {vector}: norm {update.length(vector):g}, that of the others is {usual:g}"
            worst, culprits = ratio, ((update.client_id, why),)
    return culprits


def _with_usual(updates: Sequence[Measured]) -> Iterator[tuple[Measured, str, float]]:
    """(update, vector, usual norm of the vector in the exchange)."""
    for vector in _vectors(updates):
        alone = len(updates) == 1
        usual = ALONE / OVERFLOW_TIMES if alone else median_low(update.length(vector) for update in updates)
        for update in updates:
            yield update, vector, usual


def _vectors(updates: Sequence[Measured]) -> list[str]:
    return sorted({vector for update in updates for vector in update.norms})


def _times(section: RoundSection, vector: str) -> float:
    if vector != DELTA:
        return section.max_relative_payload
    return section.max_relative_norm if section.over_relative_norm == "refuse" else 0.0


def _why(vector: str, length: float, limit: float, times: float) -> str:
    key = "max_relative_norm" if vector == DELTA else "max_relative_payload"
    return (
        f"{vector}: expected a norm of {limit:g} at most ({times:g} times the median of its round, round.{key}), "
        f"got {length:g}"
    )
