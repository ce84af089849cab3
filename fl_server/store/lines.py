"""The part of the ledger's interface for what people read: the history, and values of runs and clients in short."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from fl_server.store.records import HistoryRecord


class Lines(Protocol):
    """Lines of history by number, and short lists of values."""

    def add_history(self, entry: HistoryRecord) -> None:
        """Write a line of history without any other change."""
        ...

    def history(self, subject: str = "", limit: int = 1000) -> list[HistoryRecord]:
        """The newest `limit` lines about a subject ("" for all), oldest first."""
        ...

    def history_span(self, subject: str, limit: int, before: int = 2**63 - 1) -> tuple[int, int]:
        """Numbers of the first and the last of the newest `limit` lines about a subject with numbers under `before`.

        (0, -1) if there are none. The first is 0 if there are fewer than `limit`.
        """
        ...

    def history_between(self, subject: str, span: tuple[int, int], limit: int) -> list[tuple[int, HistoryRecord]]:
        """The first `limit` lines about a subject with numbers from and to those of the span, each with its number."""
        ...

    def history_details(self, subject: str, event: str) -> list[str]:
        """The details of all lines of an event about a subject, oldest first."""
        ...

    def after_history(self, call: Callable[[], object] | None) -> None:
        """Call this after each transaction with lines of history, in the transaction's thread; None: nothing."""
        ...

    def newest_values(self, wanted: Mapping[str, str], limit: int) -> dict[str, list[tuple[int, float]]]:
        """The newest (round, value) of a metric of each run, in order of rounds. wanted: the metric by run id."""
        ...

    def update_counts(self) -> dict[str, tuple[int, int]]:
        """Updates (counted, refused) of each client."""
        ...
