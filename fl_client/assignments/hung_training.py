"""A training step that never ends keeps the only thread that trains: the device takes no work until it has ended."""

from __future__ import annotations

import asyncio

import structlog

from fl_client.assignments.availability import AvailabilityMonitor
from fl_client.training.worker import Worker

log = structlog.get_logger()

HANGS_S = 30.0
"""A step that goes on for so long after its cancellation or deadline hangs. Any other ends the work when it ends."""
CHECK_S = 5.0


async def watch(worker: Worker, availability: AvailabilityMonitor) -> None:
    """Report to the coordinator that the device may not train while a step hangs; until cancelled."""
    hangs = False
    while True:
        await asyncio.sleep(CHECK_S)
        seconds = worker.hangs_for()
        if (seconds >= HANGS_S) == hangs:
            continue
        hangs = not hangs
        if not hangs:
            log.info("training_goes_on")
            availability.set_training(None)
            continue
        at = f" at {place}" if (place := worker.place) else ""
        problem = f"a step has not ended {seconds:.0f} s after its work was cancelled{at}: restart the daemon"
        log.error("training_hangs", detail=problem)
        availability.set_training(problem)
