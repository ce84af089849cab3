"""Operators of a life: they pause, extend, stop and ban, and try again while the coordinator is down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fl_server.errors import InvalidInput, ServerError
from fl_server.store.errors import StoreError
from tests.deterministic.coordinator import CoordinatorProcess
from tests.deterministic.plan import SERVER, Fault
from tests.deterministic.seen import Violated

if TYPE_CHECKING:
    from tests.deterministic.life import Life

RUN = "r"
_TRIES = 4000
"""One a second: a coordinator may be away for an hour."""


async def operate(life: Life, fault: Fault) -> None:
    """The fault of an operator."""
    if fault.how == "pause":
        if await act(life, "pause"):
            await asyncio.sleep(fault.seconds)
        await act(life, "resume")
    else:
        await act(life, fault.how, fault.who)


async def act(life: Life, what: str, client: str = "") -> bool:
    """An operator's call. Returns whether it was done."""

    async def action(server: CoordinatorProcess) -> None:
        actions, run = server.coordinator.actions, server.coordinator.run(RUN)
        match what:
            case "pause":
                await actions.pause(run, "admin")
            case "resume":
                await actions.resume(run, "admin")
            case "extend":
                await actions.extend(run, 1, 0.0, "admin")
            case "stop":
                await actions.stop(run, "enough", "admin")
            case "ban":
                await server.operators.ban(client, "admin", "a test")
            case "unban":
                await server.operators.unban(client, "admin")

    return await as_operator(life, action)


async def as_operator(life: Life, action: Callable[[CoordinatorProcess], Any]) -> bool:
    """Call the coordinator until it answers, as long as a node may be away. Returns whether it was done."""
    for _ in range(_TRIES):
        process, server = life.processes.get(SERVER), life.server
        if process is not None and server is not None and process.alive:
            died = asyncio.Event()
            process.on_kill.append(died.set)
            task = process.spawn(action(server))
            waiting = asyncio.ensure_future(died.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if task.done() and task.cancelled():
                return False
            if task.done():
                error = task.exception()
                if error is None:
                    return True
                if isinstance(error, InvalidInput):
                    raise Violated(f"no call of an operator is refused: {error}")
                if isinstance(error, ServerError):
                    life.note(f"operator: {error!r}")
                    return False
                if not isinstance(error, StoreError):
                    life.seen.violations.append(f"no call of an operator fails: {error!r}")
                    return False
        await asyncio.sleep(1.0)
    return False
