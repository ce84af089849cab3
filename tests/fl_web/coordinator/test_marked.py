"""The marked entries of a run's history."""

from __future__ import annotations

from fl_web.coordinator.reader import MarkedEntries
from protos.fl.v1 import admin_pb2 as pb


async def test_old_entries_are_found_once_and_new_ones_are_added() -> None:
    """A restart that lies 5,000 entries back is found; the second look reads nothing that is known."""
    history = [pb.HistoryEntry(number=number, event="round_committed") for number in range(1, 5001)]
    history[6].event = "run_recovered"
    calls: list[int] = []

    async def read(subject: str, limit: int, before: int) -> pb.ListHistoryResponse:
        calls.append(before)
        older = [entry for entry in history if not before or entry.number < before][-limit:]
        return pb.ListHistoryResponse(entries=older, first_number=older[0].number if older[0].number > 1 else 0)

    marked = MarkedEntries(read, {"run_recovered"})
    found = await marked.of("run", await read("run", 500, 0))
    assert [entry.number for entry in found] == [7]
    assert len(calls) == 6
    history += [pb.HistoryEntry(number=number, event="run_recovered") for number in (5001, 5002)]
    found = await marked.of("run", await read("run", 500, 0))
    assert [entry.number for entry in found] == [7, 5001, 5002]
    assert len(calls) == 7
