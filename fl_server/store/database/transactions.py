"""Opens a ledger and runs its transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, RowMapping, Select

from fl_server.store.database.connection import database_errors, engine_for, migrate
from fl_server.store.database.ownership import Home, claim, identify, require_claim
from fl_server.store.database.statements import HISTORY
from fl_server.store.errors import StoreError
from fl_server.store.files import Durability

ANYWHERE = Home("")
"""The home of a ledger that belongs to no state directory."""


class Transactions:
    """A SQLAlchemy engine or database URL, opened as a ledger and brought to the schema of this version.

    With durability "power" every write is fsynced. A write raises StoreTakenOver once another coordinator has opened
    the ledger.
    """

    def __init__(
        self, url_or_engine: str | Engine, durability: Durability = "process", home: Home | None = ANYWHERE
    ) -> None:
        """home: the state directory that the ledger must belong to; None for a reader."""
        self._after_history: Callable[[], object] | None = None
        with database_errors("open the ledger"):
            self._engine = engine_for(url_or_engine)
        self._reads = self._engine.execution_options(reads=True)
        self._fsynced = self._engine.execution_options(fsynced=True)
        self._writes = self._fsynced if durability == "power" else self._engine
        try:
            with database_errors("open the ledger"), self._fsynced.begin() as db:
                migrate(db)
                self._claim = None if home is None else claim(db, home)
                self._coordinator_id = identify(db)
        except StoreError:
            self.close()
            raise

    @property
    def _byte_order(self) -> str:
        """The collation that orders text by its bytes."""
        return "BINARY" if self._engine.dialect.name == "sqlite" else "C"

    @property
    def coordinator_id(self) -> str:
        """Random id of this ledger, made once with it."""
        return self._coordinator_id

    def close(self) -> None:
        """Release files and connections."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self, doing: str, *, fsynced: bool = False) -> Iterator[Connection]:
        """A transaction. `doing` completes "could not ..." in errors."""
        with database_errors(doing), (self._fsynced if fsynced else self._writes).begin() as db:
            if self._claim is not None:
                require_claim(db, self._claim)
            db.info.pop(HISTORY, None)  # of a transaction that was rolled back
            yield db
            has_history = db.info.pop(HISTORY, False)
        if has_history and self._after_history is not None:
            self._after_history()

    def after_history(self, call: Callable[[], object] | None) -> None:
        """Call this after each transaction with lines of history, in the transaction's thread; None: nothing."""
        self._after_history = call

    def _read(self, doing: str, query: Select[tuple[object, ...]]) -> list[RowMapping]:
        with database_errors(f"read {doing}"), self._reads.begin() as db:
            return list(db.execute(query).mappings())
