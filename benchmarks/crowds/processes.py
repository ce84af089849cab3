"""Processes that hold the clients of a benchmark, each with a pipe to the benchmark."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import TypeVar

C = TypeVar("C")

_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def crowds(live: Callable[[Pipe, C], None], groups: Iterable[C]) -> Iterator[list[Pipe]]:
    """A process for each group, which runs `live` with its end of a pipe; the processes end with the block."""
    pipes, processes = [], []
    for group in groups:
        here, there = _SPAWN.Pipe()
        process = _SPAWN.Process(target=live, args=(there, group), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def raise_file_limit(count: int) -> None:
    """Allow this many open files: each connection is one. Children inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"expected a limit of {count} open files or more, got {hard}: use fewer --clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
