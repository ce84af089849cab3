"""Times of the web page's views with many runs and clients.

Fills a ledger with ended runs, some open ones, and clients. Starts a real coordinator on it and `fl web`, and measures
each view from the request to the last byte, with a new connection each time: the first request, and the median of
later ones that are too far apart to share replies. Prints JSON.

    python -m benchmarks.web --runs 1000 --clients 10000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from benchmarks.deployment import Deployment, cpu_s, resident_mb
from benchmarks.long_ledger import CREATED, Size, fill
from benchmarks.processes import Child, Processes
from fl_server.store.database.store import Store, open_ledger
from fl_server.store.records import ClientRecord
from fl_server.store.state_directory import lock_directory

VIEWS = ("/", "/runs", "/runs?q=run-09", "/runs/run-0000", "/clients", "/clients?q=site%3Dlab-7", "/clients?order=seen",
         "/events", "/compare?run=run-0000&run=run-0001")  # fmt: skip
PAUSE_S = 1.0
"""Between two requests of a view: replies of the coordinator are shared for less."""
_TIMEOUT_S = 300.0
_LIST_ROWS = 500
"""Clients that are written at a time."""


def fill_clients(store: Store, count: int) -> None:
    """Write clients as they register, with labels and a device."""
    for first in range(0, count, _LIST_ROWS):
        store.put_clients([
            ClientRecord(
                f"edge-{number:05d}", CREATED, CREATED + number, instance_id=f"{number:032x}", software="impetus 0.1.0",
                labels={"site": f"lab-{number % 50}", "kind": "bench"},
                device={"kind": "cpu", "name": "x86_64", "memory_bytes": 8 << 30},
                tasks=({"name": "digits", "version": "1", "source": f"sha256:{number:064x}", "train_examples": 100,
                        "eval_examples": 10},),
                updates_counted=number % 91,
            )
            for number in range(first, min(first + _LIST_ROWS, count))
        ])  # fmt: skip


@contextmanager
def open_page(folder: Path, admin: str) -> Iterator[tuple[Child, str, str]]:
    """`fl web` for as long as the block lasts: its process, host:port, and the cookie of its login link."""
    log = folder / "web.log"
    command = [sys.executable, "-m", "fl_ops", "web", "--insecure", "--server", admin, "--listen", "127.0.0.1:0"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:  # noqa: S603 - our own module
        try:
            link = urlsplit(_login_link(log))
            connection = HTTPConnection(link.netloc, timeout=_TIMEOUT_S)
            connection.request("GET", f"{link.path}?{link.query}")
            cookie = str(connection.getresponse().getheader("set-cookie")).partition(";")[0]
            connection.close()
            yield Child("web", process, log), link.netloc, cookie
        finally:
            process.terminate()


def _login_link(log: Path) -> str:
    """The link that `fl web` prints. Raises TimeoutError."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        if links := [word for word in log.read_text().split() if word.startswith("http://") and "login" in word]:
            return links[0]
        time.sleep(0.1)
    raise TimeoutError(f"fl web printed no login link in {_TIMEOUT_S:g} s: {log.read_text()}")


def timed(address: str, cookie: str, path: str) -> tuple[float, int]:
    """Seconds and bytes of a page, with a new connection."""
    began = time.monotonic()
    connection = HTTPConnection(address, timeout=_TIMEOUT_S)
    connection.request("GET", path, headers={"Cookie": cookie})
    response = connection.getresponse()
    size = len(response.read())
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"{path}: expected status 200, got {response.status}")
    return time.monotonic() - began, size


def measure(folder: Path, repeats: int) -> dict[str, object]:
    """Start both processes, and time every view."""
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(folder))
        server = Deployment(folder, processes, tls=False).serve()
        child, address, cookie = stack.enter_context(open_page(folder, server.admin.server))
        views = {}
        before = cpu_s(child), cpu_s(server.child)
        for path in VIEWS:
            first, size = timed(address, cookie, path)
            later = []
            for _ in range(repeats):
                time.sleep(PAUSE_S)
                later.append(timed(address, cookie, path)[0])
            views[path] = {"first_s": round(first, 3), "later_s": round(median(later), 3), "bytes": size}
        pages = len(VIEWS) * (repeats + 1)
        return {
            "views": views,
            "web_cpu_s_a_page": round((cpu_s(child) - before[0]) / pages, 3),
            "coordinator_cpu_s_a_page": round((cpu_s(server.child) - before[1]) / pages, 3),
            "web_memory_mb": round(resident_mb(child)),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10_000, help="over all runs")
    parser.add_argument("--open", type=int, default=5, help="runs that have not ended")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        state, began = folder / "state", time.monotonic()
        with lock_directory(state) as lock:
            store = open_ledger(None, state, "process", lock.home)
            lock.keep_ledger(store.coordinator_id)
            fill(store, state, Size(options.runs, options.rounds, options.open))
            fill_clients(store, options.clients)
            store.close()
        sizes = {"runs": options.runs, "clients": options.clients, "filled_s": round(time.monotonic() - began, 1)}
        print(json.dumps({**sizes, **measure(folder, options.repeats)}, indent=2))


if __name__ == "__main__":
    main()
