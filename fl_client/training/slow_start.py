"""A start that takes long says where: the task's module may never end its import, and its data may be large."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from algorithms.outside_code import place_of_thread

log = structlog.get_logger()

FIRST_S = 30.0
"""Until the first line; each further one comes after twice the time."""


@contextmanager
def slow_start_logged(task: str) -> Iterator[None]:
    """Log now and then in which line the task's code is, while this thread imports it and loads its data."""
    done, thread = threading.Event(), threading.get_ident()

    def report() -> None:
        waited, wait = 0.0, FIRST_S
        while not done.wait(wait):
            waited, wait = waited + wait, 2 * wait
            log.warning(
                "task_still_loading",
                task=task,
                seconds=round(waited),
                place=place_of_thread(thread) or "not in its code",
                todo="if this line stays the same, the task's code does not end: end the daemon and correct it",
            )

    threading.Thread(target=report, name="slow_start", daemon=True).start()
    try:
        yield
    finally:
        done.set()
