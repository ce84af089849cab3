"""Rounds of a large fleet: thousands of clients attached, and a part of them drawn in each round, without training.

    python -m benchmarks.active_fleet --clients 10000 --drawn 250 1000 4000

Measures the time from commit to commit, the lag of the coordinator's event loop, its memory and its processor time, for
each number of drawn clients. After each case, the same processes send and receive the same bytes over bare gRPC streams
(`benchmarks/floors.py`). Prints one JSON line. It fails if an update did not count or the model is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.constant_task import STEP
from benchmarks.crowds.active_clients import Count, Counts, Crowd, Floor, live
from benchmarks.crowds.processes import crowds, raise_file_limit
from benchmarks.deployment import TASK, TIMEOUT_S, Deployment, Server, cpu_s, forget_peak, peak_mb, resident_mb
from benchmarks.floors import Traffic, grpc_floor
from benchmarks.processes import Processes
from benchmarks.scrape import histogram, quantile
from benchmarks.table import markdown
from fl_ops.admin.client import AdminClient
from fl_tasks import fingerprint, load_task
from protos.fl.v1 import admin_pb2, coordinator_pb2

LAG = "fl_event_loop_lag_seconds"
_LIMITS = "[limits]\nreattach_grace_s = 120\n"
TENSORS = 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Rounds of a large fleet.")
    parser.add_argument("--clients", type=int, default=10_000, help="number of attached clients")
    parser.add_argument("--drawn", type=int, nargs="+", default=[250, 1000, 4000], help="clients of a round, by case")
    parser.add_argument("--params", type=int, default=250_000, help="float32 parameters of the model")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each case; one more comes first")
    parser.add_argument("--processes", type=int, default=2, help="number of processes for the clients")
    parser.add_argument("--ahead-mib", type=float, default=1.0, help="the coordinator's transfers.ahead_mib")
    parser.add_argument("--no-floors", dest="floors", action="store_false", help="do not measure the lower bounds")
    case = parser.parse_args(arguments)
    raise_file_limit(case.clients + max(case.drawn) + 500)
    with tempfile.TemporaryDirectory(prefix="active-fleet-") as folder, Processes(Path(folder)) as processes:
        found = measure(case, Deployment(Path(folder), processes, tls=False))
    print(json.dumps(found))
    _log("\n".join(markdown(rows(found))))


def measure(case: argparse.Namespace, deployment: Deployment) -> dict[str, Any]:
    """Start, attach, and measure each case."""
    server = deployment.serve(extra=f"{_LIMITS}[transfers]\nahead_mib = {case.ahead_mib}\n")
    empty = resident_mb(server.child)
    with attached_fleet(case, server.address) as pipes, server.operator() as admin:
        seconds = seconds_until(lambda: ask(pipes).attached == case.clients, "all are attached")
        _log(f"coordinator {server.child.process.pid}: {case.clients} attached after {seconds:.1f} s")
        found = {"clients": case.clients, "params": case.params, "rounds": case.rounds}
        found["ahead_mib"] = case.ahead_mib
        found["server_rss_mb"] = {"empty": empty, "attached": resident_mb(server.child)}
        found["cases"] = []
        for drawn in case.drawn:
            result = _rounds(case, server, admin, drawn) | {"drawn": drawn}
            if case.floors:
                result |= _floor(case, pipes, drawn, result["round_s_median"])
            _log(json.dumps(result))
            found["cases"].append(result)
        expected = sum(case.drawn) * (case.rounds + 1)
        seconds_until(lambda: ask(pipes).counted >= expected, f"{expected} updates have counted")
        last = ask(pipes)
        found |= {"connections_lost": last.lost, "calls_failed": last.failed}
    return found


def rows(found: dict[str, Any]) -> Iterator[dict[str, object]]:
    """The columns of docs/measurements/benchmarks.md."""
    for case in found["cases"]:
        lag = case["loop_lag_ms"]
        yield {
            "clients": f"{found['clients']:,}",
            "drawn": f"{case['drawn']:,}",
            "round, median": f"{case['round_s_median']:.2f} s",
            "over bare gRPC": f"{case['over_grpc']:.2f} ({case['floor_grpc_s']:.2f} s)" if "over_grpc" in case else "",
            "server CPU a round": f"{case['server_cpu_s_per_round']:.2f} s",
            "loop lag, p50 and p99": f"{lag['p50']:.0f} ms, {lag['p99']:.0f} ms",
            "server memory, peak": f"{case['server_rss_mb']:.0f} MB",
        }


def _rounds(case: argparse.Namespace, server: Server, admin: AdminClient, drawn: int) -> dict[str, Any]:
    """One run. Its first round is not measured: files and connections' buffers are made in it."""
    forget_peak(server.child)
    spec = spec_of(case, drawn)
    run = admin.runs.create_run(spec).run.run_id
    committed(admin, run, 1)
    lag, cpu = histogram(server.metrics, LAG), cpu_s(server.child)
    rounds = committed(admin, run, case.rounds + 1)
    used, later = cpu_s(server.child) - cpu, histogram(server.metrics, LAG)
    commits = [committed.committed.ToNanoseconds() / 1e9 for committed in rounds]
    seconds = [after - before for before, after in itertools.pairwise(commits)]
    check_model(admin, run, case)
    return {
        "round_s": [round(duration, 3) for duration in seconds],
        "round_s_median": round(statistics.median(seconds), 3),
        "phases_s": {name: round(spent, 3) for name, spent in rounds[-1].account.seconds.items()},
        "server_cpu_s_per_round": round(used / case.rounds, 3),
        "loop_lag_ms": {
            "p50": round(quantile(lag, later, 0.50).value * 1000, 1),
            "p99": round(quantile(lag, later, 0.99).value * 1000, 1),
            "p99_at_most": quantile(lag, later, 0.99).bound * 1000,
        },
        "server_rss_mb": peak_mb(server.child),
    }


def _floor(case: argparse.Namespace, pipes: Sequence[Pipe], drawn: int, seconds: float) -> dict[str, float]:
    """The same bytes for the same number of clients, in the same processes."""
    size, turns = 4 * case.params, case.rounds + 1
    with grpc_floor(Traffic(drawn, size, size, turns)) as (port, result):
        for index, pipe in enumerate(pipes):
            clients = len(range(drawn)[index :: len(pipes)])
            pipe.send(Floor(port, clients, size, turns))
        floor, used = result()
        for pipe in pipes:
            pipe.recv()
    return {
        "floor_grpc_s": round(floor, 3),
        "floor_server_cpu_s": round(used, 3),
        "over_grpc": round(seconds / floor, 2),
    }


@contextmanager
def attached_fleet(case: argparse.Namespace, server: str) -> Iterator[list[Pipe]]:
    """Processes with the clients, which attach to the server."""
    offer = coordinator_pb2.TaskOffer(name=TASK, train_examples=1, eval_examples=1)
    offer.fingerprint.version, offer.fingerprint.source = fingerprint(load_task(TASK))
    names = [f"client-{index:05d}" for index in range(case.clients)]
    groups = [tuple(names[index :: case.processes]) for index in range(case.processes)]
    with crowds(live, [Crowd(server, group, offer.SerializeToString(), case.params) for group in groups]) as pipes:
        yield pipes


def ask(pipes: Sequence[Pipe]) -> Counts:
    """The counts of all processes together."""
    for pipe in pipes:
        pipe.send(Count())
    answers: list[Counts] = [pipe.recv() for pipe in pipes]
    return Counts(
        attached=sum(answer.attached for answer in answers),
        counted=sum(answer.counted for answer in answers),
        lost=sum(answer.lost for answer in answers),
        failed=sum(answer.failed for answer in answers),
    )


def committed(admin: AdminClient, run: str, wanted: int) -> list[admin_pb2.RoundSummary]:
    """The run's rounds, once it has so many."""

    def done() -> bool:
        status = admin.runs.get_run(run).run
        if status.ended.seconds and status.rounds_done < wanted:
            raise SystemExit(f"the run ended after {status.rounds_done} of {wanted} rounds: {status.reason}")
        return bool(status.rounds_done >= wanted)

    seconds_until(done, f"{wanted} rounds are committed", 0.5)
    return list(admin.runs.get_run(run).rounds)


def check_model(admin: AdminClient, run: str, case: argparse.Namespace) -> None:
    """Every parameter must be the sum of the steps."""
    with tempfile.NamedTemporaryFile() as file:
        for part in admin.models.export_model(run, "latest"):
            file.write(part.chunk.data)
        file.flush()
        value = STEP * (case.rounds + 1)
        if not all(torch.allclose(tensor, torch.tensor(value)) for tensor in load_file(file.name).values()):
            raise SystemExit(f"the model is wrong: expected {value} everywhere")


def seconds_until(holds: Callable[[], bool], what: str, pause_s: float = 0.1) -> float:
    """Wait; returns the seconds. Ends the program if it takes too long."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > TIMEOUT_S:
            raise SystemExit(f"timeout: after {TIMEOUT_S:g} s it is not true that {what}")
        time.sleep(pause_s)
    return time.monotonic() - began


def spec_of(case: argparse.Namespace, drawn: int) -> admin_pb2.RunSpec:
    """The run of a case."""
    spec = admin_pb2.RunSpec(name=f"active-{drawn}", seed=0)
    spec.task.name = TASK
    spec.task.options.update({"parameters": case.params, "tensors": TENSORS})
    spec.algorithm.name = "fedavg"
    spec.local.learning_rate = 1.0
    spec.round.clients_per_round = spec.round.min_clients = drawn
    spec.stop.rounds = case.rounds + 1
    spec.evaluation.every = 0
    return spec


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
