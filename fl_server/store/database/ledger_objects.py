"""The files in the object store that count, and the objects that are to be removed.

A file counts once its row is written, by a transaction that checks that this coordinator is still the last that opened
the ledger. A removal is written first and done later. So what a coordinator that was replaced puts into the store, or
has no time to remove, changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import BigInteger, Column, Connection, LargeBinary, String, Table, delete, insert, select

from fl_server.store.database.schema import JsonText, metadata
from fl_server.store.database.transactions import Transactions

_TOGETHER = 500
"""Values of one statement: their number is limited."""

objects = Table(
    "objects",
    metadata,
    Column("name", String(512), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("part_bytes", BigInteger, nullable=False),
    Column("parts", JsonText, nullable=False, comment="[end of a key, ...]"),
)

object_removals = Table("object_removals", metadata, Column("key", String(1024), primary_key=True))


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the object store, cut into parts, each of which is an object."""

    name: str
    """Its path in the state directory."""
    size_bytes: int
    digest: bytes
    """BLAKE3-256 of the whole file."""
    part_bytes: int
    """Bytes of each part but the last."""
    parts: tuple[str, ...]
    """The keys of its parts behind the name: number, epoch, count and BLAKE3-256, as NNNNN.EPOCH-COUNT.HEX."""

    @property
    def keys(self) -> list[str]:
        """The keys of its parts, below the ledger's folder."""
        return [f"{self.name}/{part}" for part in self.parts]


class ObjectLedger(Transactions):
    """The part of the `Store` for files in the object store."""

    def stored_files(self) -> list[StoredFile]:
        """All files that count, by name."""
        rows = self._read("the files in the object store", select(objects).order_by(objects.c.name))
        return [StoredFile(**{**row, "parts": tuple(row["parts"])}) for row in rows]

    def add_stored_files(self, files: Sequence[StoredFile], *, fsynced: bool) -> None:
        """Let files count. The parts of files that they replace are to be removed, but for those that they have too."""
        with self._transaction("add files in the object store", fsynced=fsynced) as db:
            self._remove(db, [file.name for file in files], {key for file in files for key in file.keys})
            if files:
                db.execute(insert(objects), [asdict(file) for file in files])

    def remove_stored_files(self, names: Sequence[str], others: Sequence[str] = ()) -> None:
        """Let files count no more; their parts, and other objects of which no file counts, are to be removed."""
        with self._transaction("remove files from the object store") as db:
            self._remove(db, names)
            self._to_remove(db, others)

    def object_removals(self, limit: int) -> list[str]:
        """Keys of objects to be removed."""
        query = select(object_removals).order_by(object_removals.c.key).limit(limit)
        return [row["key"] for row in self._read("the objects to be removed", query)]

    def objects_removed(self, keys: Sequence[str]) -> None:
        """These objects are removed."""
        with self._transaction("note removed objects") as db:
            for some in _some(keys):
                db.execute(delete(object_removals).where(object_removals.c.key.in_(some)))

    def _remove(self, db: Connection, names: Sequence[str], kept: Collection[str] = ()) -> None:
        """kept: keys of parts that stay."""
        for some in _some(names):
            rows = db.execute(select(objects.c.name, objects.c.parts).where(objects.c.name.in_(some))).all()
            keys = [f"{name}/{part}" for name, parts in rows for part in parts]
            self._to_remove(db, [key for key in keys if key not in kept])
            db.execute(delete(objects).where(objects.c.name.in_(some)))

    @staticmethod
    def _to_remove(db: Connection, keys: Sequence[str]) -> None:
        for some in _some(keys):
            known = set(db.scalars(select(object_removals.c.key).where(object_removals.c.key.in_(some))))
            if fresh := [{"key": key} for key in dict.fromkeys(some) if key not in known]:
                db.execute(insert(object_removals), fresh)


def _some(values: Sequence[str]) -> list[Sequence[str]]:
    return [values[first : first + _TOGETHER] for first in range(0, len(values), _TOGETHER)]
