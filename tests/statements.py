"""SQL statements compiled once for all ledgers that a process opens."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, event


class _Compiled(dict[Any, Any]):
    """Compiled statements by kind of database.

    SQLAlchemy keeps them by the engine's dialect object. Each ledger of a test has its own, of the same kind as those
    before it, and would compile the same statements again.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_by_kind(key), default)

    def __setitem__(self, key: Any, statement: Any) -> None:
        super().__setitem__(_by_kind(key), statement)


def _by_kind(key: Any) -> Any:
    dialect, *rest = key
    return (type(dialect), *rest)


def share() -> None:
    """From now on, engines of one kind share their compiled statements."""
    compiled = _Compiled()

    @event.listens_for(Engine, "engine_connect")
    def shared(connection: Connection) -> None:
        connection.execution_options(compiled_cache=compiled)
