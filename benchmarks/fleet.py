"""What idle clients cost: thousands of them attached to one coordinator that has nothing for them to do.

    python -m benchmarks.fleet --clients 10000 --processes 4

Measures resident memory a client, processor time while idle, seconds until all are attached, seconds from the start of
a round until every sampled client has its assignment, and seconds until all are back after a kill -9 of the
coordinator. The clients speak the real protocol with the daemons' own code; each has a connection of its own. Prints
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from benchmarks.idle_clients import Crowd, live
from benchmarks.place import PATIENCE_S, TASK, Place, Server, cpu_s, resident_mb
from benchmarks.table import markdown
from fl_ops.demo.processes import Processes
from protos.fl.v1 import admin_pb2, coordinator_pb2
from protos.pem import Pem, PemFiles
from tasks import fingerprint, load_task

_SPAWN = multiprocessing.get_context("spawn")
_LIMITS = "[limits]\nreattach_grace_s = 120\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What idle clients cost.")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--sampled", type=int, default=1000, help="clients of the one round")
    parser.add_argument("--processes", type=int, default=4, help="processes that the clients live in")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds over which idleness is measured")
    parser.add_argument("--tls", action="store_true", help="mTLS instead of plain text")
    case = parser.parse_args(arguments)
    _may_open_files(case.clients + 500)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder, Processes(Path(folder)) as processes:
        found = measure(case, Place(Path(folder), processes, tls=case.tls))
    print(json.dumps(found))
    _say("\n".join(markdown([row(found)])))


def measure(case: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Start, attach, idle, sample, kill, come back."""
    server = place.serve(extra=_LIMITS)
    empty, start = resident_mb(server.child), cpu_s(server.child)
    with _crowds(case, place, server.address) as crowds:
        attached = _seconds(lambda: _attached(crowds) == case.clients, "all are attached")
        _say(f"{case.clients} attached after {attached:.1f} s")
        full, before = resident_mb(server.child), cpu_s(server.child)
        time.sleep(case.idle)
        busy = cpu_s(server.child) - before
        told, spread = _assignments(case, server, crowds)
        _say(f"{case.sampled} assigned after {told:.2f} s")
        back, later = _come_back(case, place, server, crowds)
    return {
        "clients": case.clients,
        "tls": case.tls,
        "attached_s": round(attached, 2),
        "attach_server_cpu_ms_a_client": round((before - start) * 1000 / case.clients, 2),
        "server_rss_mb": {"empty": empty, "full": full},
        "kb_a_client": round((full - empty) * 1024 / case.clients, 1),
        "idle_cpu_share": round(busy / case.idle, 4),
        "sampled": case.sampled,
        "assigned_s": round(told, 3),
        "first_to_last_assignment_s": round(spread, 3),
        "back_after_kill_s": round(back, 2),
        "back_server_cpu_ms_a_client": round(cpu_s(later.child) * 1000 / case.clients, 2),
    }


def row(found: dict[str, Any]) -> dict[str, object]:
    """What was measured, as docs/benchmarks.md has it."""
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
    """Seconds from the request for a run until the last sampled client has its assignment, and from the first."""
    with server.operator() as admin:
        began = time.time()
        run = admin.create_run(_spec(case)).run_id
        _seconds(lambda: len(_times(crowds)) >= case.sampled, "all sampled clients have their assignment")
        admin.stop_run(run, "measured")
    times = _times(crowds)
    return max(times) - began, max(times) - min(times)


def _come_back(case: argparse.Namespace, place: Place, server: Server, crowds: Sequence[Pipe]) -> tuple[float, Server]:
    """Seconds from the death of the coordinator until everybody is attached to the next one, and that one.

    That is started at once, as whoever looks after a service does.
    """
    ports, all_came_twice = (_port(server.address), _port(server.admin.server)), _arrivals(crowds) + case.clients
    began = time.monotonic()
    server.child.process.kill()
    server.child.process.wait()
    later = place.serve(ports, _LIMITS)
    _say(f"the next one serves {time.monotonic() - began:.1f} s after the kill")
    _seconds(lambda: _attached(crowds) == case.clients and _arrivals(crowds) >= all_came_twice, "all are back")
    return time.monotonic() - began, later


@contextmanager
def _crowds(case: argparse.Namespace, place: Place, server: str) -> Iterator[list[Pipe]]:
    """Processes full of clients; they end with the block."""
    task = load_task(TASK)
    offer = coordinator_pb2.TaskOffer(name=TASK, train_examples=1, eval_examples=1)
    offer.fingerprint.version, offer.fingerprint.source = fingerprint(task)
    names = [f"client-{index:05d}" for index in range(case.clients)]
    pipes, processes = [], []
    for index in range(case.processes):
        mine = tuple(names[index :: case.processes])
        files = {name: _pem(place, name) for name in mine} if place.tls else {}
        here, there = _SPAWN.Pipe()
        process = _SPAWN.Process(
            target=live, args=(there, Crowd(server, mine, offer.SerializeToString(), files)), daemon=True
        )
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


def _pem(place: Place, name: str) -> Pem:
    mine = place.certificates("client", name)
    return PemFiles(mine.cert, mine.key, mine.ca).read()


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
        if time.monotonic() - began > PATIENCE_S:
            raise SystemExit(f"waited {PATIENCE_S:g} s in vain until {what}")
        time.sleep(0.1)
    return time.monotonic() - began


def _say(words: str) -> None:
    print(words, file=sys.stderr)


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


def _may_open_files(count: int) -> None:
    """A connection is an open file; the children inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"expected that {count} files may be open, and the limit here is {hard}: take fewer --clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
