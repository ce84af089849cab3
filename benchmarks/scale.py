"""Rounds through workers: clients that fetch a model and send updates at once, with one process and with several.

    python -m benchmarks.scale --workers 0 1 2 4 8                      # 64 clients x 44.7 MB, for 16 cores
    python -m benchmarks.scale --clients 8 --workers 0 1 2 --processes 2   # for two cores

0 workers is a coordinator that does everything. For each number, the same clients then send and receive the same bytes
over bare gRPC streams with as many server processes (`benchmarks/floors.py`). Prints one JSON line, and a table on
stderr. It fails if an update did not count or the model is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from benchmarks.active_fleet import ask, attached_fleet, check_model, committed, seconds_until, spec_of
from benchmarks.crowds.active_clients import Floor
from benchmarks.crowds.processes import raise_file_limit
from benchmarks.deployment import Deployment, cpu_s, peak_mb
from benchmarks.floors import Traffic, grpc_floor
from benchmarks.processes import Child, Processes
from benchmarks.rivals.ports import free_ports
from benchmarks.table import markdown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Rounds through workers.")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="number of workers, by case")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--params", type=int, default=11_173_962, help="float32 parameters of the model")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each case; one more comes first")
    parser.add_argument("--processes", type=int, default=8, help="processes of the clients")
    parser.add_argument("--no-floors", dest="floors", action="store_false", help="do not measure the lower bounds")
    case = parser.parse_args(arguments)
    raise_file_limit(4 * case.clients + 500)
    found: dict[str, Any] = {"clients": case.clients, "params": case.params, "cases": []}
    for workers in case.workers:
        with tempfile.TemporaryDirectory(prefix="scale-") as folder, Processes(Path(folder)) as processes:
            result = measure(case, workers, Deployment(Path(folder), processes, tls=False))
        print(json.dumps(result), file=sys.stderr, flush=True)
        found["cases"].append(result)
    print(json.dumps(found))
    print("\n".join(markdown(rows(found))), file=sys.stderr)


def measure(case: argparse.Namespace, workers: int, deployment: Deployment) -> dict[str, Any]:
    """One case: start everything, and measure the rounds."""
    listen, serve = (f"127.0.0.1:{port}" for port in free_ports(2))
    section = f'[workers]\nlisten = "{listen}"\nserve = "{serve}"\n' if workers else ""
    server = deployment.serve(extra=f"[limits]\nreattach_grace_s = 120\n{section}")
    children = [started(deployment, number) for number in range(workers)]
    with attached_fleet(case, server.address) as pipes, server.operator() as admin:
        seconds_until(lambda: ask(pipes).attached == case.clients, "all are attached")
        run = admin.runs.create_run(spec_of(case, case.clients)).run.run_id
        committed(admin, run, 1)
        before = [cpu_s(child) for child in (server.child, *children)]
        rounds = committed(admin, run, case.rounds + 1)
        used = [cpu_s(child) - cpu for child, cpu in zip((server.child, *children), before, strict=True)]
        check_model(admin, run, case)
        times = [summary.committed.ToNanoseconds() / 1e9 for summary in rounds]
        seconds = statistics.median(after - earlier for earlier, after in itertools.pairwise(times))
        result = {
            "workers": workers,
            "round_s": round(seconds, 3),
            "rounds_a_minute": round(60 / seconds, 2),
            "bytes_a_second": round(8 * case.params * case.clients / seconds),
            "coordinator_cpu_s_per_round": round(used[0] / case.rounds, 3),
            "worker_cpu_s_per_round": [round(cpu / case.rounds, 3) for cpu in used[1:]],
            "coordinator_mb": peak_mb(server.child),
            "worker_mb": [peak_mb(child) for child in children],
            "phases_s": {name: round(spent, 3) for name, spent in rounds[-1].account.seconds.items()},
        }
        if case.floors:
            result["floor_round_s"] = round(floor_seconds(case, pipes, max(1, workers)), 3)
        return result


def started(deployment: Deployment, number: int) -> Child:
    """A worker that serves."""
    settings = deployment.folder / f"worker-{number}.toml"
    settings.write_text('metrics_listen = ""\n')
    as_worker = ("--config", str(settings), "--role", "data")
    child = deployment.processes.start(f"worker-{number}", "fl_server", deployment.folder / "server.toml", *as_worker)
    seconds_until(lambda: '"serving"' in child.log.read_text() or child.process.poll() is not None, "a worker serves")
    if child.process.poll() is not None:
        raise SystemExit(f"a worker has ended: {child.log.read_text()[-2000:]}")
    return child


def floor_seconds(case: argparse.Namespace, pipes: Sequence[Pipe], servers: int) -> float:
    """Seconds of a turn of bare streams with so many server processes; the slowest one counts."""
    size, turns = 4 * case.params, case.rounds + 1
    servers = min(servers, len(pipes))
    with ExitStack() as stack:
        results = []
        for number in range(servers):
            mine = pipes[number::servers]
            clients = len(range(case.clients)[number::servers])
            port, result = stack.enter_context(grpc_floor(Traffic(clients, size, size, turns)))
            for index, pipe in enumerate(mine):
                pipe.send(Floor(port, len(range(clients)[index :: len(mine)]), size, turns))
            results.append(result)
        slowest = max(result()[0] for result in results)
        for pipe in pipes:
            pipe.recv()
    return slowest


def rows(found: dict[str, Any]) -> Iterator[dict[str, object]]:
    """The columns of docs/measurements/benchmarks.md."""
    for case in found["cases"]:
        yield {
            "workers": case["workers"],
            "round": f"{case['round_s']:.2f} s",
            "rounds a minute": f"{case['rounds_a_minute']:.1f}",
            "MB a second": f"{case['bytes_a_second'] / 1e6:.0f}",
            "over bare gRPC": f"{case['round_s'] / case['floor_round_s']:.2f}" if "floor_round_s" in case else "",
            "coordinator CPU a round": f"{case['coordinator_cpu_s_per_round']:.2f} s",
            "workers' CPU a round": f"{sum(case['worker_cpu_s_per_round']):.2f} s",
            "coordinator memory, peak": f"{case['coordinator_mb']:.0f} MB",
        }


if __name__ == "__main__":
    main()
