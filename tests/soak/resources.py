"""Resources of a process from /proc, its metrics, and the size of its state directory."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MB = 1e6


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one process at a time."""

    at_s: float
    """Seconds since the soak began."""
    rss_mb: float
    """Resident memory."""
    files: int
    """Open descriptors on paths."""
    sockets: int
    others: int
    """Pipes, epolls and the like."""
    threads: int
    state_files: int
    """Files and folders in its state directory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The coordinator at a time."""

    held: Resources
    tasks: int
    """asyncio tasks."""
    sessions: int
    present: int
    """Clients with an open stream."""
    series: int
    """Lines of its metrics."""
    disk_mb: dict[str, float] = field(default_factory=dict)
    """Size of each part of the state directory; the ledger with its log."""


def of_process(pid: int, state_dir: Path, at_s: float) -> Resources:
    """The resources of a process on this machine; Linux only."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kinds = list(_descriptors(pid))
    return Resources(
        at_s=at_s,
        rss_mb=int(status["VmRSS"].split()[0]) * 1024 / MB,
        files=kinds.count("file"),
        sockets=kinds.count("socket"),
        others=kinds.count("other"),
        threads=int(status["Threads"]),
        state_files=sum(1 for _ in paths(state_dir)),
    )


def _descriptors(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            target = str(descriptor.readlink())
            yield "file" if target.startswith("/") else "socket" if target.startswith("socket:") else "other"


def metrics(address: str) -> dict[str, float]:
    """Name with labels -> value, from the process's metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def paths(folder: Path) -> Iterator[Path]:
    """All files and folders below a folder, also while it changes."""
    for at, folders, files in os.walk(folder):
        yield from (Path(at) / name for name in (*folders, *files))


def disk_mb(state_dir: Path) -> dict[str, float]:
    """Sizes of spool, checkpoints, ledger and the ledger's log."""
    sizes = dict.fromkeys(("spool", "checkpoints", "ledger", "log"), 0.0)
    for path in paths(state_dir):
        with suppress(FileNotFoundError):
            sizes[_part(path.relative_to(state_dir))] += path.stat().st_size / MB if path.is_file() else 0.0
    return sizes


def _part(path: Path) -> str:
    if path.parts[0] in ("spool", "checkpoints"):
        return path.parts[0]
    return "log" if path.name.endswith(("-wal", "-shm")) else "ledger"
