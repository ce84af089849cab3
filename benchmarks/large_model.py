"""Rounds of a model of one gigabyte: the coordinator's memory, event loop lag and response times.

    python -m benchmarks.large_model --params 250000000 --clients 2

Real processes and production settings, as in `round_overhead`. During the rounds an operator lists the runs again and
again: a slow call has waited for the event loop or for the processor. Heartbeats were on time if no client lost its
connection: a ping without an answer for 12 s ends a connection, and the daemon logs that. Prints one JSON line, and the
results next to their goals.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import round_overhead
from benchmarks.deployment import Deployment, Server
from benchmarks.processes import Processes
from benchmarks.scrape import histogram, quantile
from benchmarks.table import markdown

LAG = "fl_event_loop_lag_seconds"
PAUSE_S = 0.05
"""Pause between two calls of the operator."""
MEMORY_GOAL, LAG_GOAL_MS = 2.5, 50.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The cost of a round of a large model.", parents=[_parser()])
    case = parser.parse_args(
        arguments,
        namespace=argparse.Namespace(
            algorithm="fedavg", averaging="none", tls=False, secure=False, ahead_mib=1, storage="", endpoint=""
        ),
    )
    with tempfile.TemporaryDirectory(prefix="large-model-") as folder, Processes(Path(folder)) as processes:
        watch = Watch()
        found = round_overhead.measure(case, Deployment(Path(folder), processes, tls=False), watch.during)
        found |= watch.found() | {"cut_off": _cut_off(Path(folder))}
    if case.floors:
        found |= round_overhead.floors(case, found)
    print(json.dumps(found))
    for line in (*_compared_with_goals(found), *markdown([row(found)])):
        print(line, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--params", type=int, default=250_000_000)
    parser.add_argument("--tensors", type=int, default=62)
    parser.add_argument("--largest", type=int, default=0, help="numbers of the largest tensor; 0: all are alike")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-floors", dest="floors", action="store_false", help="do not measure the lower bounds")
    return parser


class Watch:
    """Measures the lag of the coordinator's event loop and the duration of an operator's calls during the rounds."""

    def __init__(self) -> None:
        self._calls_s: list[float] = []
        self._lag: dict[str, Any] = {}

    @contextmanager
    def during(self, server: Server) -> Iterator[None]:
        """Measure while the block runs."""
        before, over = histogram(server.metrics, LAG), threading.Event()
        asking = threading.Thread(target=self._ask, args=(server, over))
        asking.start()
        try:
            yield
        finally:
            over.set()
            asking.join()
        p99 = quantile(before, histogram(server.metrics, LAG), 0.99)
        self._lag = {"p99": round(p99.value * 1000, 1), "p99_at_most": p99.bound * 1000}

    def _ask(self, server: Server, over: threading.Event) -> None:
        with server.operator() as admin:
            while not over.wait(PAUSE_S):
                began = time.monotonic()
                admin.runs.list_runs()
                self._calls_s.append(time.monotonic() - began)

    def found(self) -> dict[str, Any]:
        """The results, in milliseconds."""
        calls = sorted(self._calls_s)
        p99 = calls[int(0.99 * (len(calls) - 1))]
        return {
            "loop_lag_ms": self._lag,
            "calls_meanwhile_ms": {
                "count": len(calls), "p99": round(p99 * 1000, 1), "longest": round(calls[-1] * 1000, 1),
            },
        }  # fmt: skip


def row(found: dict[str, Any]) -> dict[str, object]:
    """The columns of docs/measurements/benchmarks.md."""
    lag, calls = found["loop_lag_ms"], found["calls_meanwhile_ms"]
    return {
        "clients": found["clients"],
        "parameters": f"{found['params']:,}",
        "round, median": f"{found['round_s_median']:.1f} s",
        "over bare gRPC": f"{found['over_grpc']:.2f}" if "over_grpc" in found else "",
        "server memory over idle, in models": f"{found['server_rss_models']:.2f}",
        "loop lag, p99": f"{lag['p99']:.0f} ms, certainly below {lag['p99_at_most']:g} ms",
        "calls meanwhile, p99 and longest": f"{calls['p99']:.0f} ms, {calls['longest']:.0f} ms",
        "connections lost": found["cut_off"],
    }


def _cut_off(logs: Path) -> int:
    """Number of connections that daemons lost, from their logs."""
    return sum(log.read_text().count('"disconnected"') for log in logs.glob("client-*.log"))


def _compared_with_goals(found: dict[str, Any]) -> Iterator[str]:
    lag = found["loop_lag_ms"]
    yield f"server memory  base + {found['server_rss_models']} models, goal {MEMORY_GOAL}"
    yield f"loop lag p99   {lag['p99']} ms (in the bucket up to {lag['p99_at_most']:g} ms), goal {LAG_GOAL_MS:g} ms"
    yield f"connections lost {found['cut_off']} times, goal 0"
    yield f"round          {found['round_s_median']} s" + (
        f", {found['over_grpc']} times bare grpc, {found['over_tcp']} times TCP" if "over_grpc" in found else ""
    )


if __name__ == "__main__":
    main()
