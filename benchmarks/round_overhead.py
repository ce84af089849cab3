"""The cost of a round without training: a real coordinator and real daemons on loopback with production settings.

    python -m benchmarks.round_overhead --clients 10 --params 11173962 --rounds 5 --algorithm fedcm

Prints one JSON line, with the time of the same bytes over bare gRPC streams and over raw TCP, measured directly after
the rounds. It fails if the final model is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.constant_task import STEP
from benchmarks.deployment import TASK, TIMEOUT_S, Deployment, Server, cpu_s, peak_mb, resident_mb
from benchmarks.floors import Traffic, grpc_seconds, tcp_seconds
from benchmarks.processes import Processes
from fl_ops.admin.client import AdminClient
from protos.fl.v1 import admin_pb2

DuringRounds = Callable[[Server], AbstractContextManager[object]]
ALPHA = 0.5
"""FedCM's local share; a power of two keeps the expected model exact."""
STATED = ("clients", "params", "tensors", "algorithm", "averaging", "tls", "secure", "ahead_mib")
"""Options of a case that stand in its results."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one case and print it."""
    case = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="round-overhead-") as folder, Processes(Path(folder)) as processes:
        found = measure(case, Deployment(Path(folder), processes, tls=case.tls))
    if case.floors:
        found |= floors(case, found)
    print(json.dumps(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The cost of a round without training.")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--params", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=62)
    parser.add_argument("--largest", type=int, default=0, help="numbers of the largest tensor; 0: all are alike")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithm", choices=("fedavg", "fedcm"), default="fedavg")
    parser.add_argument("--averaging", choices=("none", "ema", "window"), default="none")
    parser.add_argument("--tls", action="store_true", help="mTLS instead of plain text")
    parser.add_argument("--secure", action="store_true", help="secure aggregation, which needs --tls")
    parser.add_argument("--ahead-mib", type=float, default=1.0, help="the coordinator's transfers.ahead_mib")
    parser.add_argument("--storage", default="", help="the coordinator's object store; empty: its directory")
    parser.add_argument("--endpoint", default="", help="the address of a store that speaks S3")
    parser.add_argument("--no-floors", dest="floors", action="store_false", help="do not measure the lower bounds")
    parser.add_argument("--json", action="store_true", help="ignored: the output is always JSON")
    return parser


def measure(case: argparse.Namespace, deployment: Deployment, during: DuringRounds = nullcontext) -> dict[str, Any]:
    """Start all processes, run and measure; the caller stops the processes. during: entered while rounds run."""
    began = time.monotonic()
    options = ", ".join(f"{name} = {value}" for name, value in _options(case).items())
    task = f'name = "{TASK}"\noptions = {{{options}}}\n'
    objects = f'[objects]\nendpoint = "{case.endpoint}"\n' if case.endpoint else ""
    server = deployment.serve(
        extra=f"[transfers]\nahead_mib = {case.ahead_mib}\n{_limits(case)}{objects}",
        first=f'storage = "{case.storage}"\n' if case.storage else "",
    )
    idle_mb, start_s = resident_mb(server.child), cpu_s(server.child)
    clients = [deployment.daemon(f"client-{index:03d}", server.address, task) for index in range(case.clients)]
    with server.operator() as admin:
        with during(server):
            before = list(map(cpu_s, clients))
            run = admin.runs.create_run(_spec(case)).run.run_id
            rounds = committed_rounds(admin, run, case.rounds)
            used = [cpu_s(client) - start for client, start in zip(clients, before, strict=True)]
        first = time.monotonic() - began - sum(row.seconds for row in rounds[1:])
        export(admin, run, model := deployment.folder / "model.safetensors")
    check(case, load_file(model))
    seconds = [row.seconds for row in rounds]
    return {
        **{name: getattr(case, name) for name in STATED},
        "storage": case.storage.partition(":")[0] or "directory",
        "round_s": [round(duration, 4) for duration in seconds],
        "round_s_median": round(statistics.median(seconds), 4),
        "server_rss_mb": peak_mb(server.child),
        "server_rss_mb_idle": idle_mb,
        "server_rss_models": round((peak_mb(server.child) - idle_mb) * 2**20 / (4 * case.params), 2),
        "server_cpu_s_per_round": round((cpu_s(server.child) - start_s) / case.rounds, 3),
        "client_cpu_s_per_round": round(statistics.median(used) / case.rounds, 3),
        "client_rss_mb": {"peak": max(map(peak_mb, clients)), "median": statistics.median(map(peak_mb, clients))},
        "bytes_down": sum(row.bytes_down for row in rounds),
        "bytes_up": sum(row.bytes_up for row in rounds),
        "start_to_first_round_s": round(first, 2),
    }


def floors(case: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """The lower bounds: the time of the same bytes over bare gRPC and raw TCP."""
    model = case.params * 4
    down = model * (2 if case.algorithm == "fedcm" else 1)
    traffic = Traffic(case.clients, down, model, case.rounds)
    bare, raw = grpc_seconds(traffic), tcp_seconds(traffic)
    return {
        "floor_grpc_s": round(bare, 4),
        "floor_tcp_s": round(raw, 4),
        "over_grpc": round(found["round_s_median"] / bare, 2),
        "over_tcp": round(found["round_s_median"] / raw, 2),
    }


def _limits(case: argparse.Namespace) -> str:
    """TOML that allows the model, if it is larger than the usual limit."""
    mib = case.params * 4 // 2**20 + 1
    limits = {"max_update_mib": mib, "max_model_mib": mib, "max_models_mib": 2 * mib}
    return "[limits]\n" + "".join(f"{name} = {value}\n" for name, value in limits.items()) if mib > 1024 else ""


def _options(case: argparse.Namespace) -> dict[str, int]:
    """The options of the task."""
    sizes = {"parameters": case.params, "tensors": case.tensors}
    return {**sizes, "largest": case.largest} if case.largest else sizes


def _spec(case: argparse.Namespace) -> admin_pb2.RunSpec:
    spec = admin_pb2.RunSpec(name="overhead", seed=0)
    spec.task.name = TASK
    spec.task.options.update(_options(case))
    spec.algorithm.name = case.algorithm
    if case.algorithm == "fedcm":
        spec.algorithm.parameters.update({"alpha": ALPHA})
    spec.local.learning_rate = 1.0
    spec.round.clients_per_round = spec.round.min_clients = case.clients
    spec.stop.rounds = case.rounds
    spec.evaluation.every = 0
    if case.secure:
        spec.local.steps = spec.secure_aggregation.max_examples = 1
        spec.secure_aggregation.clip = 1.01 * STEP * math.sqrt(case.params)
    if case.averaging != "none":
        spec.averaging.method = case.averaging
        key, value = {"ema": ("decay", 0.95), "window": ("window", 4)}[case.averaging]
        setattr(spec.averaging, key, value)
    return spec


def committed_rounds(admin: AdminClient, run: str, wanted: int) -> list[admin_pb2.RoundSummary]:
    """Wait for the run's rounds. Ends the program if they do not come in time."""
    ends = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends:
        # The list of rounds is read once, at the end: the coordinator's work for it would count as that of the rounds.
        status = admin.runs.get_run(run, newest=0).run
        if status.rounds_done == wanted:
            return list(admin.runs.get_run(run).rounds)
        time.sleep(0.2)
    raise SystemExit(f"{status.rounds_done} of {wanted} rounds after {TIMEOUT_S:g} s: {status.reason}")


def export(admin: AdminClient, run: str, path: Path) -> None:
    """Write the run's latest model as safetensors."""
    with path.open("wb") as file:
        for part in admin.models.export_model(run, "latest"):
            if part.HasField("chunk"):
                file.write(part.chunk.data)


def check(case: argparse.Namespace, model: dict[str, torch.Tensor]) -> None:
    """Every parameter must be the sum of the steps: STEP per round, or FedCM's recurrence of it."""
    value, direction = 0.0, 0.0
    alpha = ALPHA if case.algorithm == "fedcm" else 1.0
    for _ in range(case.rounds):
        direction = -alpha * STEP + (1 - alpha) * direction
        value -= direction
    error = 1e-2 if case.secure else 1e-6  # values of 16 bits in secure aggregation
    if not all(torch.allclose(tensor, torch.tensor(value), rtol=error) for tensor in model.values()):
        raise SystemExit(f"the model is wrong: expected {value} everywhere, got {next(iter(model.values()))[:4]}")
    if math.isclose(value, 0.0):
        raise SystemExit("nothing was added")


if __name__ == "__main__":
    main()
