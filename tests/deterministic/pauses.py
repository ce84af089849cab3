"""Watches the pauses of a run whose coordinator cannot write: the run says why, until a write succeeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fl_server.store.ledger import write_when_possible
from tests.deterministic.seen import Seen


async def told_pauses(seen: Seen, cannot_write: Callable[[str], None], write: Callable[[], Awaitable[Any]]) -> Any:
    """The ledger's function `write_when_possible`, for writes of a run."""

    def told(why: str) -> None:
        cannot_write(why)
        run: Any = cannot_write.__self__  # type: ignore[attr-defined]  # a method of the run
        reason = run.run_status.waiting_reason
        if why and why not in reason:
            seen.violations.append(f"a full disk pauses a run with its reason: {reason!r}, not {why!r}")
        if not why and "cannot write" in reason:
            seen.violations.append(f"a run goes on when there is room again: {reason!r}")

    return await write_when_possible(told, write)
