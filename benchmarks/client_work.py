"""The cost of the record of clients' work, and of judging which clients need attention, with many clients.

Fills a ledger with clients that have a full record and were present, then starts a real coordinator on it, which waits
for them as if they were attached: it judges all of them. Measures what a scrape of the metrics, the overview and the
list of clients that need attention take, what the records add to the coordinator's memory and to the ledger, and how
long the ledger takes to count a round. Prints JSON.

    python -m benchmarks.client_work --clients 10000
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import grpc
from sqlalchemy import create_engine

from benchmarks.demo_grid import machine
from benchmarks.deployment import Deployment, cpu_s, resident_mb
from benchmarks.processes import Processes
from fl_server.settings.config import NEWEST_WORK
from fl_server.store.client_work import ClientWork, EndedWork, Timing
from fl_server.store.database.store import open_ledger
from fl_server.store.database.transactions import count_work
from fl_server.store.records import ClientRecord
from fl_server.store.state_directory import lock_directory
from protos.fl.v1 import admin_pb2, admin_pb2_grpc

FAILURE = EndedWork("run", 3, "KeyError at my_task.py:12", "task_error: KeyError: 'age' in my_task.py, line 12", 1.76e9)
TIMING = Timing(12.3456, 1.2345, last=False, slowness=1.0123)
BAD_EVERY = 50
"""One client of so many fails."""


def full_record(*, bad: bool) -> ClientWork:
    """A client with as many newest assignments and rounds as are kept."""
    work = ClientWork()
    for _ in range(NEWEST_WORK):
        work = work.in_round(1, TIMING)
    for _ in range(NEWEST_WORK // 4 if bad else 1):
        work = work.ended("failed", FAILURE)
    return work


def fill(state: Path, clients: int, *, with_work: bool) -> Path:
    """Write a ledger. Returns its file."""
    with lock_directory(state) as lock:
        store = open_ledger(None, state, "process", lock.home)
        lock.keep_ledger(store.coordinator_id)
        records = [ClientRecord(f"client-{index:06d}", 1.76e9, 1.76e9, present=True) for index in range(clients)]
        store.put_clients(records)
        store.close()
    (ledger,) = state.glob("*.sqlite")
    if with_work:
        texts = [json.dumps(full_record(bad=bad).to_values()) for bad in (False, True)]
        with sqlite3.connect(ledger) as database:
            rows = [(texts[index % BAD_EVERY == 0], record.client_id) for index, record in enumerate(records)]
            database.executemany("UPDATE clients SET work = ? WHERE client_id = ?", rows)
    return ledger


def cost(call: Callable[[], object], used: Callable[[], float], repeats: int) -> dict[str, float]:
    """Processor time of the first call, and the mean of the others. On a shared machine the clock says little."""
    before = used()
    call()
    first = used()
    for _ in range(repeats):
        call()
    return {"first_cpu_s": round(first - before, 4), "cpu_s": round((used() - first) / repeats, 4)}


def count_a_round(ledger: Path, clients: int, repeats: int) -> dict[str, float]:
    """The part of a commit that counts the work of clients, in a transaction of its own."""
    engine = create_engine(f"sqlite:///{ledger}")
    events = {f"client-{index:06d}": lambda work: work.in_round(1, TIMING) for index in range(clients)}

    def count() -> None:
        with engine.begin() as db:
            count_work(db, events)

    return cost(count, time.process_time, repeats)


def serve(folder: Path, clients: int, *, with_work: bool, repeats: int) -> dict[str, object]:
    """Start a coordinator on a filled ledger and call it."""
    ledger = fill(folder / "state", clients, with_work=with_work)
    with Processes(folder) as processes:
        server = Deployment(folder, processes, tls=False).serve(extra="[limits]\nreattach_grace_s = 3600\n")
        used = partial(cpu_s, server.child)
        found: dict[str, object] = {
            "ledger_mb": round(ledger.stat().st_size / 2**20, 1),
            "memory_mb": resident_mb(server.child),
        }
        with grpc.insecure_channel(server.admin.server) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            marked = admin_pb2.ListClientsRequest(marks=["attention"])
            found["overview"] = cost(lambda: stub.GetOverview(admin_pb2.GetOverviewRequest()), used, repeats)
            found["list_attention"] = cost(lambda: stub.ListClients(marked), used, repeats)
            found["need_attention"] = stub.GetOverview(admin_pb2.GetOverviewRequest()).clients_by_state["attention"]
        found["scrape"] = cost(lambda: urlopen(f"http://{server.metrics}/metrics", timeout=60).read(), used, repeats)
        found["memory_after_mb"] = resident_mb(server.child)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    result: dict[str, object] = {"clients": options.clients, "load": os.getloadavg()[0], "machine": machine()}
    for name, with_work in (("without_work", False), ("with_work", True)):
        with tempfile.TemporaryDirectory(prefix="client-work-") as temporary:
            folder = Path(temporary)
            result[name] = serve(folder, options.clients, with_work=with_work, repeats=options.repeats)
            if with_work:
                (ledger,) = (folder / "state").glob("*.sqlite")
                counted = [count for count in (100, 1000, 10_000) if count <= options.clients]
                result["count_a_round"] = {count: count_a_round(ledger, count, 3) for count in counted}
    result["bytes_of_a_record"] = len(json.dumps(full_record(bad=False).to_values()))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
