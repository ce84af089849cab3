"""Processes of a benchmark that run a function of it, such as its clients, each with a pipe to the benchmark.

None outlives the benchmark, however that ends.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import TypeVar

from fl_ops.worker_process import become_worker, end_with_parent

C = TypeVar("C")

_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def running(work: Callable[..., None], calls: Iterable[tuple[object, ...]]) -> Iterator[None]:
    """A process for each of these calls of `work`; the processes end with the block."""
    processes = [_SPAWN.Process(target=_run, args=(work, arguments), daemon=True) for arguments in calls]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _run(work: Callable[..., None], arguments: Sequence[object]) -> None:
    end_with_parent()
    work(*arguments)


@contextmanager
def crowds(live: Callable[[Pipe, C], None], groups: Iterable[C]) -> Iterator[list[Pipe]]:
    """A process for each group, which runs `live` with its end of a pipe; the processes end with the block."""
    groups = list(groups)
    pipes = [_SPAWN.Pipe() for _ in groups]
    with running(live, [(there, group) for (_, there), group in zip(pipes, groups, strict=True)]):
        for _, there in pipes:
            there.close()
        try:
            yield [here for here, _ in pipes]
        finally:
            for here, _ in pipes:
                here.close()


@contextmanager
def worker_pool(count: int, method: str = "spawn") -> Iterator[ProcessPoolExecutor]:
    """So many processes with one torch thread each. An error or an interrupt ends them in the midst of their work."""
    with ProcessPoolExecutor(count, multiprocessing.get_context(method), become_worker) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def raise_file_limit(count: int) -> None:
    """Allow this many open files: each connection is one. Children inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"expected a limit of {count} open files or more, got {hard}: use fewer --clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
