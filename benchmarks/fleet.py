"""The cost of idle clients: thousands of them attached to one coordinator without work.

    python -m benchmarks.fleet --clients 10000 --processes 4

Measures resident memory per client, processor time while idle, seconds until all are attached, seconds from the start
of a round until every sampled client has its assignment, and seconds until all are attached again after a kill -9 of
the coordinator. The clients use the real protocol with the daemons' code; each has its own connection. Prints one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from benchmarks.crowds.idle_clients import Crowd, live
from benchmarks.crowds.processes import crowds, raise_file_limit
from benchmarks.deployment import TASK, TIMEOUT_S, Deployment, Server, cpu_s, resident_mb
from benchmarks.processes import Processes
from benchmarks.table import markdown
from fl_common.certificates.pem import Pem, PemFiles
from fl_tasks import fingerprint, load_task
from protos.fl.v1 import admin_pb2, coordinator_pb2

_LIMITS = "[limits]\nreattach_grace_s = 120\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The cost of idle clients.")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--sampled", type=int, default=1000, help="number of clients in the round")
    parser.add_argument("--processes", type=int, default=4, help="number of processes for the clients")
    parser.add_argument("--idle", type=float, default=60.0, help="duration of the idle measurement, seconds")
    parser.add_argument("--tls", action="store_true", help="mTLS instead of plain text")
    case = parser.parse_args(arguments)
    raise_file_limit(case.clients + 500)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder, Processes(Path(folder)) as processes:
        found = measure(case, Deployment(Path(folder), processes, tls=case.tls))
    print(json.dumps(found))
    _log("\n".join(markdown([row(found)])))


def measure(case: argparse.Namespace, deployment: Deployment) -> dict[str, Any]:
    """Start, attach, idle, sample, kill, attach again."""
    server = deployment.serve(extra=_LIMITS)
    empty, start = resident_mb(server.child), cpu_s(server.child)
    with _crowds(case, deployment, server.address) as crowds:
        attached = _seconds(lambda: _attached(crowds) == case.clients, "all are attached")
        _log(f"{case.clients} attached after {attached:.1f} s")
        full, before = resident_mb(server.child), cpu_s(server.child)
        time.sleep(case.idle)
        busy = cpu_s(server.child) - before
        assigned, spread = _assignments(case, server, crowds)
        _log(f"{case.sampled} assigned after {assigned:.2f} s")
        back, restarted = _reattach(case, deployment, server, crowds)
    return {
        "clients": case.clients,
        "tls": case.tls,
        "attached_s": round(attached, 2),
        "attach_server_cpu_ms_a_client": round((before - start) * 1000 / case.clients, 2),
        "server_rss_mb": {"empty": empty, "full": full},
        "kb_a_client": round((full - empty) * 1024 / case.clients, 1),
        "idle_cpu_share": round(busy / case.idle, 4),
        "sampled": case.sampled,
        "assigned_s": round(assigned, 3),
        "first_to_last_assignment_s": round(spread, 3),
        "back_after_kill_s": round(back, 2),
        "back_server_cpu_ms_a_client": round(cpu_s(restarted.child) * 1000 / case.clients, 2),
    }


def row(found: dict[str, Any]) -> dict[str, object]:
    """The columns of docs/measurements/benchmarks.md."""
    return {
        "clients": f"{found['clients']:,}",
        "wire": "mTLS" if found["tls"] else "plain text",
        "memory a client": f"{found['kb_a_client']:.0f} KB",
        "idle, of a core": f"{found['idle_cpu_share']:.1%}",
        "all attached after": f"{found['attached_s']:.0f} s",
        "server CPU for each that attaches": f"{found['attach_server_cpu_ms_a_client']:.1f} ms",
        "sampled": f"{found['sampled']:,}",
        "all of them assigned after": f"{found['assigned_s']:.2f} s",
        "all back after a kill -9": f"{found['back_after_kill_s']:.0f} s",
    }


def _assignments(case: argparse.Namespace, server: Server, crowds: Sequence[Pipe]) -> tuple[float, float]:
    """Seconds until the last sampled client has its assignment: from the request for a run, and from the first one."""
    with server.operator() as admin:
        began = time.time()
        run = admin.runs.create_run(_spec(case)).run.run_id
        _seconds(lambda: len(_times(crowds)) >= case.sampled, "all sampled clients have their assignment")
        admin.runs.stop_run(run, "measured")
    times = _times(crowds)
    return max(times) - began, max(times) - min(times)


def _reattach(
    case: argparse.Namespace, deployment: Deployment, server: Server, crowds: Sequence[Pipe]
) -> tuple[float, Server]:
    """Kill the coordinator and start a new one at once. Returns seconds until all are attached, and the new one."""
    ports, arrivals = (_port(server.address), _port(server.admin.server)), _arrivals(crowds) + case.clients
    began = time.monotonic()
    server.child.process.kill()
    server.child.process.wait()
    restarted = deployment.serve(ports, _LIMITS)
    _log(f"the new coordinator serves {time.monotonic() - began:.1f} s after the kill")
    _seconds(lambda: _attached(crowds) == case.clients and _arrivals(crowds) >= arrivals, "all are attached again")
    return time.monotonic() - began, restarted


@contextmanager
def _crowds(case: argparse.Namespace, deployment: Deployment, server: str) -> Iterator[list[Pipe]]:
    """Processes with many clients each; they end with the block."""
    task = load_task(TASK)
    offer = coordinator_pb2.TaskOffer(name=TASK, train_examples=1, eval_examples=1)
    offer.fingerprint.version, offer.fingerprint.source = fingerprint(task)
    names = [f"client-{index:05d}" for index in range(case.clients)]
    groups = [tuple(names[index :: case.processes]) for index in range(case.processes)]
    with crowds(live, [_crowd(deployment, server, group, offer) for group in groups]) as pipes:
        yield pipes


def _crowd(deployment: Deployment, server: str, names: tuple[str, ...], offer: coordinator_pb2.TaskOffer) -> Crowd:
    files = {name: _pem(deployment, name) for name in names} if deployment.tls else {}
    return Crowd(server, names, offer.SerializeToString(), files)


def _pem(deployment: Deployment, name: str) -> Pem:
    files = deployment.certificates("client", name)
    return PemFiles(files.cert, files.key, files.ca).read()


def _ask(crowds: Sequence[Pipe]) -> list[tuple[int, int, list[float]]]:
    for pipe in crowds:
        pipe.send(())
    return [pipe.recv() for pipe in crowds]


def _attached(crowds: Sequence[Pipe]) -> int:
    return sum(attached for attached, _, _ in _ask(crowds))


def _arrivals(crowds: Sequence[Pipe]) -> int:
    return sum(arrivals for _, arrivals, _ in _ask(crowds))


def _times(crowds: Sequence[Pipe]) -> list[float]:
    return [time_ for _, _, times in _ask(crowds) for time_ in times]


def _seconds(holds: Callable[[], bool], what: str) -> float:
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > TIMEOUT_S:
            raise SystemExit(f"timeout: after {TIMEOUT_S:g} s it is not true that {what}")
        time.sleep(0.1)
    return time.monotonic() - began


def _log(text: str) -> None:
    print(text, file=sys.stderr)


def _spec(case: argparse.Namespace) -> admin_pb2.RunSpec:
    spec = admin_pb2.RunSpec(name="fleet", seed=0)
    spec.task.name = TASK
    spec.algorithm.name = "fedavg"
    spec.local.learning_rate = 1.0
    spec.round.clients_per_round = spec.round.min_clients = case.sampled
    spec.stop.rounds = 1
    spec.evaluation.every = 0
    return spec


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


if __name__ == "__main__":
    main()
