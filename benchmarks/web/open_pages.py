"""What open pages cost a coordinator that is otherwise idle.

Fills a ledger, starts a real coordinator with `web_listen`, loads pages and opens the event stream of each, as browsers
do. Measures the processor time of the coordinator and of its web process, and the coordinator's loop lag, without pages
and with them. Prints JSON.

    python -m benchmarks.web.open_pages --pages 200 --seconds 30
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from html import unescape
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import psutil

from benchmarks.deployment import Deployment, Server
from benchmarks.long_ledger import Size, fill
from benchmarks.processes import Processes
from benchmarks.web.__main__ import fill_clients
from fl_server.store.database.store import open_ledger
from fl_server.store.state_directory import lock_directory

VIEWS = ("/", "/runs", "/runs/run-0000", "/clients", "/events")
"""Pages that are opened in turn."""
_LIVE = re.compile(r'"(/live\?[^"]*)"')
_BUCKET = re.compile(r'^fl_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)
_CALLS = re.compile(r'^fl_rpc_seconds_(count|sum)\{[^}]*rpc="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)
_TIMEOUT_S = 120.0


class Pages:
    """Open pages: connections whose events are read and dropped."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._open: list[tuple[HTTPConnection, HTTPResponse]] = []
        self.events = 0

    def open(self, path: str) -> None:
        """Load a page, and open its stream."""
        page = HTTPConnection(self._address, timeout=_TIMEOUT_S)
        page.request("GET", path)
        text = page.getresponse().read().decode()
        page.close()
        found = _LIVE.search(text)
        if found is None:
            raise RuntimeError(f"{path}: expected the address of a stream, got a page without one")
        connection = HTTPConnection(self._address)
        connection.request("GET", unescape(found[1]))
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{found[1]}: expected status 200, got {response.status}")
        self._open.append((connection, response))
        threading.Thread(target=self._read, args=(response,), daemon=True).start()

    def _read(self, response: HTTPResponse) -> None:
        try:
            for line in response:
                self.events += line.startswith(b"event:")
        except (OSError, ValueError, AttributeError):
            return


def lag_and_calls(server: Server) -> tuple[Mapping[float, float], Counter[tuple[str, str]]]:
    """The coordinator's loop lag so far, as measurements of at most so many seconds; its calls and their seconds."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=_TIMEOUT_S) as response:
        text = response.read().decode()
    calls: Counter[tuple[str, str]] = Counter()
    for kind, name, value in _CALLS.findall(text):
        calls[name, kind] += float(value)  # type: ignore[assignment]  # a sum of seconds
    return {float(bound): float(count) for bound, count in _BUCKET.findall(text)}, calls


def watched(server: Server, web: psutil.Process, pages: Pages, seconds: float) -> dict[str, object]:
    """Shares of a core, and the loop lag, over some seconds."""
    processes = {"coordinator": psutil.Process(server.child.process.pid), "web": web}
    before, lags, events = (
        {name: process.cpu_times() for name, process in processes.items()},
        lag_and_calls(server),
        pages.events,
    )
    time.sleep(seconds)
    after, found = {name: process.cpu_times() for name, process in processes.items()}, lag_and_calls(server)
    grown = {bound: found[0][bound] - lags[0][bound] for bound in found[0]}
    calls = {name: found[1][name, "count"] - lags[1][name, "count"] for name, kind in found[1] if kind == "count"}
    shares = {
        f"{name}_cpu": (after[name].user + after[name].system - before[name].user - before[name].system) / seconds
        for name in processes
    }
    most = min(bound for bound, count in grown.items() if count == grown[float("inf")])
    return {
        **{name: round(share, 4) for name, share in shares.items()},
        "lags_measured": grown[float("inf")],
        "all_lags_at_most_s": most,
        "events_a_second": round((pages.events - events) / seconds, 1),
        "calls_a_second": {name: round(count / seconds, 2) for name, count in sorted(calls.items()) if count},
        "lags_over": {f"{bound:g} s": grown[float("inf")] - grown[bound] for bound in (0.005, 0.01, 0.02, 0.05)},
        "web_memory_mb": round(web.memory_info().rss / 2**20),
    }


def measure(folder: Path, count: int, seconds: float) -> dict[str, object]:
    """Start a coordinator, and open pages."""
    with Processes(folder) as processes:
        server = Deployment(folder, processes, tls=False).serve(first='web_listen = "127.0.0.1:0"\n')
        lines = [json.loads(line) for line in server.child.log.read_text().splitlines() if line.startswith("{")]
        address = next(line["web_listen"] for line in lines if line["event"] == "serving")
        pages = Pages(address)
        connection = HTTPConnection(address, timeout=_TIMEOUT_S)
        connection.request("GET", "/healthz")  # waits for the web process
        connection.getresponse().read()
        (web,) = psutil.Process(server.child.process.pid).children()
        time.sleep(3)
        idle = watched(server, web, pages, seconds)
        began = time.monotonic()
        for number in range(count):
            pages.open(VIEWS[number % len(VIEWS)])
        opened_s = time.monotonic() - began
        time.sleep(3)
        return {
            "pages": count,
            "opened_in_s": round(opened_s, 1),
            "without_pages": idle,
            "with_pages": watched(server, web, pages, seconds),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2_000, help="over all runs")
    parser.add_argument("--open", type=int, default=5, help="runs that have not ended")
    parser.add_argument("--clients", type=int, default=1_000)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with lock_directory(folder / "state") as lock:
            store = open_ledger(None, folder / "state", "process", lock.home)
            lock.keep_ledger(store.coordinator_id)
            fill(store, folder / "state", Size(options.runs, options.rounds, options.open))
            fill_clients(store, options.clients)
            store.close()
        print(json.dumps(measure(folder, options.pages, options.seconds), indent=2))


if __name__ == "__main__":
    main()
